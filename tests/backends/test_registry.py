from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY
from tests.expected import expect_error
from workbench.backends import registry
from workbench.backends.cluster import running_head
from workbench.config.description import Description
from workbench.errors import BadInput, MissingDependency, NotFound
from workbench.support.machine import Process


@pytest.fixture(autouse=True)
def own_labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))


def describe(name: str = "mine", **models: Any) -> Description:
    return Description.of(
        name, models={"actor": TINY, **models}, placement=None, prompts=None, training=wb.Training(engine="torch"),
        generation=wb.Generation(engine="transformers"), dtype="float32", backend="inline", device="cpu", devices=1,
        seed=0, address=None,
    )  # fmt: skip


def opened(description: Description, **changes: Any) -> registry.Record:
    record = registry.Record(
        id=description.id, name=description.name, digests=description.digests, run_folder="runs", address=None,
        hosts={"shared-0": Process.current()},
    )  # fmt: skip
    return registry.write(replace(record, **changes), description)


def test_each_opening_has_an_id_of_its_own_and_the_same_digest() -> None:
    one, two = describe(), describe()
    assert one.id != two.id
    assert one.digests == two.digests
    assert one.hosts(Path())[0].lab == one.id


def test_what_is_written_is_found() -> None:
    description = describe()
    record = opened(description)
    assert registry.find("mine") == registry.get("mine") == record
    assert registry.description(record).digest == description.digest
    assert registry.find("other") is None
    with expect_error(NotFound, rule="there are: mine"):
        registry.get("other")
    with expect_error(BadInput, rule="letters, digits"):
        registry.find("../mine")


def test_closing_the_old_one_leaves_the_new_one_of_the_same_name() -> None:
    old, new = describe(), describe()
    opened(old)
    registry.forget(old.id)
    opened(new)
    registry.append_to_journal(new.id, {"run": 1})
    registry.append_to_journal(old.id, {"run": 99})  # a kernel that does not know yet
    registry.start_journal(old.id, {"run": 99})
    registry.forget(old.id)
    found = registry.get("mine")
    assert found.id == new.id
    assert list(registry.journal(found.id)) == [{"run": 1}]
    assert list(registry.journal(old.id)) == []


def test_half_an_entry_hides_none_behind_it() -> None:
    """A disk that was full cuts an entry anywhere, and the kernel goes on behind it."""
    record = opened(describe())
    file = record.folder / registry.JOURNAL
    entries = [{"run": n, "text": "x" * 20} for n in range(3)]
    registry.start_journal(record.id, entries[0])
    before = file.read_bytes()
    registry.append_to_journal(record.id, entries[1])
    whole = file.read_bytes()
    for cut in range(len(before), len(whole)):
        file.write_bytes(whole[:cut])
        registry.append_to_journal(record.id, entries[2])
        assert list(registry.journal(record.id)) == [entries[0], entries[2]], cut


def test_a_write_that_fails_leaves_no_half_entry() -> None:
    record = opened(describe())
    file = record.folder / registry.JOURNAL
    registry.start_journal(record.id, {"run": 1})
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, limits[1]))  # as a quota: the first 40 bytes fit
    try:
        for write in (registry.append_to_journal, registry.start_journal):
            with expect_error(OSError, value="too large"):
                write(record.id, {"run": 2, "text": "x" * 500})
            assert file.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path.name for path in record.folder.iterdir() if path.name.startswith("journal") and path != file]
    registry.append_to_journal(record.id, {"run": 3})
    assert list(registry.journal(record.id)) == [{"run": 1}, {"run": 3}]


def test_alive_needs_every_process_and_is_not_told_from_another_machines_ids() -> None:
    me = Process.current()
    gone, elsewhere = replace(me, created_s=0.0), replace(me, machine="another-machine")
    record = opened(describe())
    for hosts, alive in [([me, me], True), ([me, gone], False), ([elsewhere, me], None), ([elsewhere, gone], False)]:
        assert replace(record, hosts={str(i): host for i, host in enumerate(hosts)}).alive is alive


def test_code_that_cannot_be_imported_here_is_named_with_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_in_the_notebook.py").write_text("def score(prompt, response, **row):\n    return 1.0\n")
    with monkeypatch.context() as there:
        there.syspath_prepend(tmp_path)
        import only_in_the_notebook  # type: ignore[import-not-found]

        record = opened(describe(reward=only_in_the_notebook.score))
    del sys.modules["only_in_the_notebook"]
    with expect_error(MissingDependency, value="module 'only_in_the_notebook'", remedy="PYTHONPATH=.*wb stop mine"):
        registry.description(record)
    assert [found.id for found in registry.records()] == [record.id]  # `wb ls` and `wb stop` need no more than that


def test_an_unreadable_record_hides_no_other(tmp_path: Path) -> None:
    record = opened(describe())
    broken = record.folder.parent / "broken"
    broken.mkdir()
    (broken / "lab.json").write_text('{"name": "bro')
    with pytest.warns(UserWarning, match="skipped: .*broken/lab.json"):
        assert registry.records() == [record]
    assert registry.records() == [record]  # told once


def test_a_record_that_is_refused_is_told_once(tmp_path: Path) -> None:
    record = opened(describe())
    head = tmp_path / "home" / "head.json"
    for path in (head, record.folder / "lab.json", record.folder / registry.JOURNAL):
        path.unlink(missing_ok=True)
        path.mkdir()
    for found in (registry.records, running_head, lambda: list(registry.journal(record.id))):
        with pytest.warns(UserWarning, match="skipped: .*cannot be read: Is a directory"):
            assert not found()
        assert not found()


def test_an_owner_that_another_version_recorded_is_known() -> None:
    record = opened(describe())
    registry.own(record.id, "c1")
    file = record.folder / "owner.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "since_s": 1.0}))
    assert registry.owner(record.id) == registry.Owner(controller="c1", process=Process.current())


def test_a_record_of_another_version_is_refused_by_attach_and_can_be_stopped() -> None:
    record = replace(opened(describe(), format=1), format=1)
    file = record.folder / "lab.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "field_of_a_later_version": 0}))
    assert registry.get("mine") == record
    with expect_error(BadInput, value="record has format 1", rule=f"reads {registry.FORMAT}", remedy="wb stop mine"):
        registry.description(record)
