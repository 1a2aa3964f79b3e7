"""What a stage leaves in the journal, and what a later kernel reads there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.backends import registry
from workbench.errors import NotDriving
from workbench.session import journal as journal_module
from workbench.session.journal import SessionJournal, read_journal


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[wb.Workbench]:
    """An inline workbench that writes a journal, as those on Ray do."""
    with tiny_lab("journal", tmp_path, backend="inline", models={"actor": TINY}) as lab:
        description = lab.description
        record = registry.Record(
            id=description.id, name=lab.name, digests=description.digests, run_folder=str(lab.run_folder), address=None,
            hosts={},
        )  # fmt: skip
        registry.write(record, description)
        lab.ownership.take()
        journal = SessionJournal(lab.runner, lab.position, lab.checkpoints, lab.prompts)
        journal.rewrite()
        lab.ownership.journal = journal
        yield lab
        registry.forget(description.id)


def entries(lab: wb.Workbench) -> int:
    return len(list(registry.journal(lab.description.id)))


def test_a_stage_appends_when_it_is_sent_and_when_it_has_ended(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    before = entries(lab)
    batch = lab.actor.compute_log_prob(batch)
    sent, over = list(registry.journal(lab.description.id))[before:]
    number = lab.runner.counters.run
    assert list(sent["sent"]) == [number]
    assert over["over"] == number
    assert list(over["batches"]) == [batch.id]
    assert len(over["locations"]) == 1  # the other columns are where they were


def test_the_entries_together_say_what_there_is(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4))
    lab.release("batch1 v1")
    lab.actor.compute_log_prob(batch, temperature=0.5)
    found = read_journal(lab.description.id)
    assert list(found.batches) == list(lab.store)
    assert (found.counters["run"], found.counters["iteration"]) == (lab.runner.counters.run, 1)
    assert found.open_runs == {}
    monkeypatch.setattr(journal_module, "SLACK", -1000)
    lab.actor.compute_log_prob(batch, temperature=0.7)
    assert entries(lab) == 1
    compact = read_journal(lab.description.id)
    assert list(compact.batches) == [*found.batches, next(reversed(list(lab.store)))]
    assert (compact.counters["run"], compact.open_runs) == (lab.runner.counters.run, {})


def test_a_value_that_cannot_be_read_hides_no_other(lab: wb.Workbench) -> None:
    batch = lab.prompts.next(2)
    registry.append_to_journal(lab.description.id, {"batches": {"gone v1": b"cno_such_module\nThing\n."}})
    lab.actor.generate_sequences(batch, max_new_tokens=4)
    assert list(read_journal(lab.description.id).batches) == list(lab.store)


def test_a_kernel_that_was_taken_over_from_appends_nothing(lab: wb.Workbench) -> None:
    batch = lab.prompts.next(2)
    before = entries(lab)
    registry.own(lab.description.id, "another")
    assert lab.ownership.drives  # until it asks
    with pytest.raises(NotDriving):
        lab.actor.generate_sequences(batch, max_new_tokens=4)
    assert not lab.ownership.drives
    lab.ownership.record()
    assert entries(lab) == before
