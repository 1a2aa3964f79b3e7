"""What stays of a notebook in a script, where it stands there, and the way back."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from tests.export.test_adversarial import page
from workbench.errors import BadInput
from workbench.export.back import notebook_of
from workbench.export.cells import Cell, read_notebook
from workbench.export.exporting import script_of
from workbench.export.interrupted import done_of
from workbench.export.kinds import LAB_LOOKS
from workbench.export.looking import frame_looks
from workbench.export.made_calls import Made, MadeCall

LESSONS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
OPEN = 'lab = wb.open("x", models={"actor": "tiny-llama"}, placement=wb.Placement.colocate(1), prompts=["a"])'
IMPORT = "import workbench as wb"


def body(script: str) -> list[str]:
    """The lines of main."""
    lines = script.split("def main(")[1].split("if __name__")[0].split("-> None:\n")[1]
    return [line.strip() for line in lines.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "lessons", [LESSONS[::6], pytest.param(LESSONS, marks=pytest.mark.thorough)], ids=["some", "all"]
)
def test_lessons_come_back_as_they_went(tmp_path: Path, subtests: pytest.Subtests, lessons: list[Path]) -> None:
    for lesson in lessons:
        with subtests.test(lesson=lesson):
            import nbformat

            script = script_of(read_notebook(lesson).cells)
            assert "lab.panel(" not in script.text
            assert len(script.parameters) >= 3
            notebook = notebook_of(script.text)
            nbformat.validate(notebook)
            nbformat.write(notebook, tmp_path / "back.ipynb")
            again = script_of(read_notebook(tmp_path / "back.ipynb").cells)
            assert again.text == script.text


def test_lines_that_only_show_something_are_left_out() -> None:
    script = script_of(
        page(
            IMPORT,
            OPEN,
            "lab",
            "lab.memory()",
            "batch = lab.prompts.next(2)\nbatch.peek(1)",
            "frame = lab.spans()\nframe = frame[frame['parent'] == '']\nprint(frame.head())\nprint(len(frame))",
            "panel = lab.panel()\npanel.show('timeline')",
            "ppo = wb.PPO(lab)\nppo.graph()",
            "history = ppo.run(2)[['a', 'b']].head()\nhistory.plot()",
            "ppo.run(3).describe()",
            "lab.close()",
        )
    ).text
    assert body(script)[-5:] == [
        "batch = lab.prompts.next(2)",
        "ppo = wb.PPO(lab)",
        "ppo.run(2)",
        "ppo.run(3)",
        "lab.close()",
    ]


def test_a_frame_that_only_a_picture_used_is_left_out() -> None:
    made = [
        "frame = batch.df()",
        "frame['length'] = frame['response_ids'].map(len)",
        "frame['words'] = frame['response_text'].str.split().map(lambda words: len(words))",
        "frame['mean'] = frame.groupby('prompt')['rewards'].transform('mean')",
        "frame = frame[frame['length'] > 3].drop(columns=['words'])",
        "frame.loc[0, 'mean'] = 0\nframe.columns = ['LENGTH', 'MEAN', 'PROMPT']",
        "shown = [column for column in frame if column != 'PROMPT']",
    ]
    plot = "plt.scatter(frame['LENGTH'], frame['MEAN'])\npx.line(frame[shown]).show()"
    imports = f"{IMPORT}\nimport numpy as np\nimport matplotlib.pyplot as plt\nfrom plotly import express as px"
    cells = [imports, OPEN, "batch = lab.actor.generate_sequences(lab.prompts.next(2))", *made, plot, "lab.close()"]
    text = script_of(page(*cells)).text
    assert body(text)[-2:] == ["batch = lab.actor.generate_sequences(lab.prompts.next(2))", "lab.close()"]
    assert not re.search("frame|numpy|plotly|matplotlib|shown", text)
    kept = script_of(page(*cells[:-1], "import numpy as np\nlab.report('x', {'n': frame['LENGTH'].mean()})")).text
    assert [line for line in "\n".join(made[:6]).splitlines() if line not in kept.replace('"', "'")] == []
    assert "shown" not in kept


def test_names_of_results_that_nothing_reads_go_and_the_calls_stay() -> None:
    own = "class Mine(wb.PPO):\n    def evaluate(self):\n        return object()"
    goes = {
        "history = ppo.run(2)": "ppo.run(2)",
        "reward = ppo.iterate()['compute_reward/rewards/mean']  # of one": "ppo.iterate()  # of one",
        "comparison = lab.compare(batch, {'ppo': ppo})": "lab.compare(batch, {'ppo': ppo})",
        "metrics = lab.actor.update_actor(\n    batch,\n    epochs=2,\n)": "lab.actor.update_actor(",
    }
    stays = [
        "held = lab.actor.compute_log_prob(batch)",  # a batch that no variable holds may be written to the disk
        "other = mine.evaluate()",  # what it returns is the notebook's own
        "read = ppo.run(3)",
        "late = ppo.run(4)",
        "asked = ppo.run(5)",
    ]
    uses = "def f():\n    return late\nlab.report('x', {'n': len(f()) + len(read.query('iteration > @asked'))})"
    start = "batch = lab.actor.generate_sequences(lab.prompts.next(2))\nppo = wb.PPO(lab)\nmine = Mine(lab)"
    kept = body(script_of(page(IMPORT, OPEN, own, start, *goes, *stays, uses)).text.replace('"', "'"))
    assert [line for line in (*goes.values(), *stays) if line not in kept] == []
    assert not any(line.startswith(name.partition(" ")[0]) for line in kept for name in goes)


def test_an_import_without_an_effect_goes_where_no_line_mentions_it() -> None:
    imports = "import math, mine\nimport numpy as np\nfrom collections import Counter, deque\nimport torch.nn as nn"
    cells = [imports, IMPORT, OPEN, "lab.put({'x': deque([1])})\nnote = 'np.ndarray'\nlab.report(note, {})"]
    head = script_of(page(*cells)).text.split("def main")[0]
    assert "from collections import deque" in head
    assert "import mine" in head  # it may register something
    assert "import numpy as np" in head  # a text names it
    assert not re.search("math|Counter|torch", head)


def test_a_script_without_options_says_which_it_could_have(tmp_path: Path) -> None:
    import nbformat

    texts = ["MODEL = 'tiny-llama'  # the actor's\nSTEPS, seen = 3, []\nrate = 1e-5\nn = 0\nUNUSED = 4", IMPORT, OPEN]
    use = "n += 1\nlab.report(MODEL, {'n': rate * n})\nlab.close()"
    script = script_of(page(("# Title",), *texts, use))
    hint = "no cell is tagged `parameters`, so the script has no options of its own. MODEL, rate (cell 2) become"
    assert [told for told in script.told if told.startswith(hint) and told.endswith("`--parameters MODEL rate`")]
    head = " ".join(line.lstrip("# ") for line in script.text.split("import workbench")[0].splitlines())
    assert "This script has no options of its own. MODEL, rate become options where their cell in the" in head
    formatted = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "--check", "-"]
    subprocess.run(formatted, input=script.text, text=True, check=True)
    nbformat.write(notebook_of(script.text), tmp_path / "back.ipynb")
    assert script_of(read_notebook(tmp_path / "back.ipynb").cells).text == script.text
    tagged = script_of(page((texts[0], "parameters"), *texts[1:], use))
    for other in (tagged, script_of(page(*texts, use), parameters=["rate"])):
        assert other.parameters and "options" not in str(other.told) + other.text
    assert script_of(page(IMPORT, OPEN, "lab.close()")).told == ()


def test_what_is_timed_is_left_out_and_told() -> None:
    timed = "%timeit -n 3 lab.memory()\nfor _ in range(2):\n    %timeit sum([1])\nlab.close()"
    text = "text = '''\n%timeit not a line of it\n'''\nlab.report(text, {})"
    script = script_of(page(IMPORT, OPEN, timed, "%%timeit -r 2\nlab.memory()", text, ("%timeit 3", "skip-export")))
    assert [told for told in script.told if "left out" in told] == [
        "cell 3: `%timeit -n 3 lab.memory()` is left out, with what it runs",
        "cell 3: `%timeit sum([1])` is left out, with what it runs",
        "cell 4: `%%timeit -r 2` is left out, with what it runs",
    ]
    assert "timeit -" not in script.text


def test_methods_that_only_look_are_methods() -> None:
    from workbench.algorithms.buffer import Buffer
    from workbench.algorithms.loop import Algorithm
    from workbench.batches.batch import Batch
    from workbench.controller import Workbench
    from workbench.data.prompt_stream import PromptStream
    from workbench.session.history import History
    from workbench.stages.group import WorkerGroup
    from workbench.telemetry import TelemetryStore

    owners = (Workbench, Batch, Buffer, Algorithm, WorkerGroup, PromptStream, History, TelemetryStore)
    there = {name for owner in owners for name in dir(owner)}
    assert LAB_LOOKS - {"weight_digests"} <= there  # an operation of the workers


def test_calls_that_only_show_something_are_left_out() -> None:
    cells = page(
        IMPORT, OPEN, "ppo = wb.PPO(lab)\nlab.strip()\nppo.arguments('update_actor')\nppo.run(1)", "lab.close()"
    )
    text = script_of(cells).text
    assert "ppo.run(1)" in text and "strip" not in text and "arguments" not in text


def test_a_run_that_generates_ahead_is_written_with_its_dial() -> None:
    cells = page(
        IMPORT, OPEN, "ppo = wb.PPO(lab)\nppo.run(4, staleness=2)\nlab.buffer",
        "lab.buffer.groups()\nlab.buffer.df()\nppo.draw_ahead()\nlab.buffer.priority = lambda groups: groups.reward",
        "lab.buffer.clear(older_than=4)\nppo.run(2)\nlab.close()",
    )  # fmt: skip
    assert body(script_of(cells).text)[-6:] == [
        "ppo.run(4, staleness=2)", "ppo.draw_ahead()", "lab.buffer.priority = lambda groups: groups.reward",
        "lab.buffer.clear(older_than=4)", "ppo.run(2)", "lab.close()",
    ]  # fmt: skip


def test_used_keeps_what_results_depend_on() -> None:
    cells = page(
        IMPORT,
        OPEN,
        "batch = lab.actor.generate_sequences(lab.prompts.next(2))",
        "side = lab.actor.compute_log_prob(batch)\nprint(side.fetch(['old_log_prob']))",
        "import os\nos.environ['A'] = 'b'",
        "batch = lab.actor.compute_log_prob(batch)",
        "settings = {}\nsettings['clip'] = 0.1\nlab.actor.update_actor(batch, **settings)",
    )
    kept = body(script_of(cells, used=True).text)
    assert [line for line in kept if "side" in line or "print" in line] == []
    assert kept[-4:] == [
        "batch = lab.actor.compute_log_prob(batch)",
        "settings = {}",
        'settings["clip"] = 0.1',
        "lab.actor.update_actor(batch, **settings)",
    ]
    assert 'os.environ["A"] = "b"' in kept
    assert "side = lab.actor.compute_log_prob(batch)" in body(script_of(cells).text)


def test_imports_are_sorted_and_those_for_looking_go() -> None:
    script = script_of(
        page(
            "import pandas as pd\nimport torch, os\nfrom math import pi, e",
            "import antigravity_plugin",
            "from plotly import express as px\npx.line([1])",
            "os.environ['A'] = str(pi)\ntorch.manual_seed(0)",
            "pd.DataFrame([e])",
        )
    ).text
    head = [line for line in script.split("def main")[0].splitlines() if line]
    assert sorted(head) == sorted(
        ["import os", "from math import pi", "import antigravity_plugin", "import torch", "import workbench as wb"]
    )
    assert head.index("from math import pi") < head.index("import torch")


def test_parameters_are_typed_options() -> None:
    cells = page(
        (
            "RATE = 3e-6  # of Adam\nNAMES = ['a', 'b']\nNONE = None\nON = True\nDERIVED = RATE * 2\nx: float = 1",
            "parameters",
        ),
        "STEPS = 3",
        "import os\nos.environ['A'] = f'{RATE} {NAMES} {NONE} {ON} {DERIVED} {x} {STEPS}'",
    )
    script = script_of(cells, parameters=["STEPS"])
    assert script.parameters == ("RATE", "NAMES", "NONE", "ON", "x", "STEPS")
    for line in (
        'RATE: Annotated[float, "of Adam"] = 3e-6,',
        'NAMES: list[str] = ["a", "b"],',
        "NONE: str | None = None,",
        "ON: bool = True,",
        "x: float = 1,",
        "STEPS: int = 3,",
        "DERIVED = RATE * 2",
    ):
        assert line in script.text
    with expect_error(BadInput, value="parameter 'LR'", remedy="STEPS"):
        script_of(cells, parameters=["LR"])


def test_definitions_that_read_variables_stay_in_main() -> None:
    script = script_of(
        page(
            ("SCALE = 2", "parameters"),
            "LIMIT = 3\ndef a(x):\n    return min(x, LIMIT)",
            "def b(x):\n    return a(x) * SCALE",
            "class C:\n    f = staticmethod(a)",
            "def d():\n    return b(C.f(1))",
            "import os\nos.environ['A'] = str(d())",
        )
    ).text
    above, within = script.split("def main")
    assert [name for name in ("def a", "LIMIT = 3", "class C") if name not in above] == []
    assert [name for name in ("    def b", "    def d") if name not in within] == []


def test_repeats_are_offered_as_loops() -> None:
    stages = [
        "batch = lab.prompts.next(2)\nbatch.peek()",
        "batch = lab.actor.generate_sequences(batch)",
        "lab.memory()",
    ]
    cells = page(IMPORT, OPEN, *stages, *stages, *stages, "lab.close()")
    plain = script_of(cells)
    assert plain.text.count("generate_sequences") == 3
    assert plain.told == ("cells 3 to 10: 2 lines, 3 times; `--loops` writes them as a loop",)
    looped = script_of(cells, loops=True)
    assert looped.text.count("generate_sequences") == 1
    assert looped.parameters == ("REPEATS_1",)
    assert "for _ in lab.iterations(REPEATS_1):" in looped.text  # each turn draws prompts once
    text = script_of(page(IMPORT, OPEN, ("## By hand",), *stages, *stages), loops=True).text
    assert text.index("# By hand") < text.index("for _ in")
    plain = script_of(page(IMPORT, OPEN, *["lab.actor.save()"] * 3), loops=True)
    assert "for _ in range(REPEATS_1):" in plain.text
    by_algorithm = script_of(page(IMPORT, OPEN, "ppo = wb.PPO(lab)", *["ppo.iterate()"] * 3), loops=True)
    assert "for _ in lab.iterations(REPEATS_1):" in by_algorithm.text
    for more in ("[lab.prompts.next(2) for _ in range(2)]", "lab.prompts.next(2); ppo.run(1)", "mine.iterate()"):
        again = script_of(
            page(IMPORT, OPEN, "ppo = wb.PPO(lab)\nmine = other(ppo)", *[more] * 3, "import math as other"), loops=True
        )
        assert "in range(REPEATS_1):" in again.text
    assert "REPEATS_1: Annotated[int" in looped.text


def test_a_protocol_of_the_notebook_is_there_before_the_worker_that_names_it() -> None:
    worker = 'class Mine(wb.Worker):\n    @wb.register("LAST")\n    def count(self):\n        return 1'
    added = 'wb.protocol("LAST", collect=lambda layout: [layout.size - 1])'
    used = f"{OPEN}\nlab.reload(Mine)"
    cells = page(IMPORT, added, worker, used)
    text = script_of(cells).text
    assert text.index("def main") < text.index("wb.protocol") < text.index("class Mine")
    for other in ('protocol="LAST"', "NAME"):
        text = script_of(page(IMPORT, added, "NAME = 'LAST'", worker.replace('"LAST"', other), used)).text
        assert text.index("wb.protocol") < text.index("class Mine")
    papers = script_of(page(IMPORT, worker.replace("LAST", "ONE_TO_ALL"), used)).text
    assert papers.index("class Mine") < papers.index("def main")


def test_a_move_becomes_the_placement_that_a_script_opens_with() -> None:
    cells = page(IMPORT, OPEN, "batch = lab.prompts.next(2)", "lab.move(wb.Placement.split(2))", "lab.close()")
    script = script_of(cells)
    assert "placement=wb.Placement.split(2)" in script.text
    assert "move" not in script.text
    assert "cell 4" in script.told[0]
    assert "lab.move(wb.Placement.split(2))" in script_of(cells, moves="steps").text
    by_hand = script_of([*cells[:3], cells[4]], placements={"x": 'wb.Placement.of({"a": (1, ["actor"])})'})
    assert 'placement=wb.Placement.of({"a": (1, ["actor"])})' in by_hand.text
    returned = script_of(page(IMPORT, OPEN, "change = lab.move(wb.Placement.split(2))", "lab.evaluate(change)"))
    assert "change = lab.move(" in returned.text
    assert "'change', is used" in returned.told[0]


def test_markdown_explains_code_and_titles_the_script() -> None:
    script = script_of(
        page(
            ('# A title\n\nWhat it is for: """quotes""" and \\ too.',),
            ("## Part\nWhy.",),
            "import os",
            ("Only looks",),
            "os.environ",
            ("### Set\n\n- one\n- two",),
            "os.environ['A'] = 'b'",
        )
    ).text
    assert script.startswith("r\"\"\"A title\n\nWhat it is for: '''quotes''' and \\ too.")
    assert "    # Set\n    #\n    # - one\n    # - two\n\n    os.environ" in script
    assert "Only looks" not in script


def test_the_way_back_wants_a_main() -> None:
    with expect_error(BadInput, value="no function that is run"):
        notebook_of("x = 1\n")
    with expect_error(BadInput, value="without a default"):
        notebook_of('def main(x):\n    pass\n\n\nif __name__ == "__main__":\n    main(1)\n')


def test_cells_are_named_as_the_page_shows_them() -> None:
    assert str(Cell(4, "x", count=7)) == "cell 4 (In [7])"
    assert str(Cell(0, "x", count=7)) == "a deleted cell (In [7])"


def test_what_changes_a_thing_in_place_has_no_name_of_a_frames_method_that_only_looks() -> None:
    import io
    import threading
    from collections import deque
    from pathlib import Path as FilePath

    import torch

    for kind in (torch.nn.Module, torch.optim.Optimizer, threading.Thread, io.TextIOWrapper, list, set, dict, deque):
        shared = set(dir(kind)) & frame_looks()
        assert shared <= {"copy", "count", "get", "index", "items", "keys", "type", "values"}, kind
    assert set(dir(FilePath)) & frame_looks() <= {"match", "rename"}
    for name in ("groupby", "agg", "sort_values", "pivot_table", "describe", "to_dict", "bar"):
        assert name in frame_looks()
    for name in ("sample", "to_csv", "isetitem", "insert", "update", "apply", "eval"):
        assert name not in frame_looks()


def test_calls_that_do_something_stay_whatever_their_name() -> None:
    does = [
        "lab.drop('critic')", "lab.actor.mean()", "group.count(2)", "frame.sample(2)", "rows.sort()",
        "frame.to_csv('a.csv')", "np.random.seed(3)", "frame.query('x > 1', inplace=True)", "np.add(a, a, out=a)",
        "frame.agg(mine)", "sorted(rows, key=mine)",
    ]  # fmt: skip
    made = "group = lab.actor\nframe = pd.DataFrame({'x': [1, 2]})\nrows = [2, 1]\na = np.ones(2)"
    mine = "def mine(x):\n    rows.append(x)"
    cells = page(IMPORT, "import pandas as pd\nimport numpy as np", OPEN, made, mine, *does)
    text = script_of(cells).text.replace('"', "'")
    assert [line for line in does if line not in text] == []


def test_tables_of_what_happened_are_looks() -> None:
    lines = [
        "batch = lab.prompts.next(2)",
        "events = lab.telemetry.events()",
        "apart = batch.disagreements('a', 'b')",
        "apart.df",
    ]
    used = body(script_of(page(IMPORT, OPEN, *lines, "lab.actor.generate_sequences(batch)")).text)
    assert used[-2:] == ["batch = lab.prompts.next(2)", "lab.actor.generate_sequences(batch)"]


def test_an_order_of_prompts_stays_with_its_function() -> None:
    script = script_of(
        page(
            IMPORT,
            OPEN,
            "def hardest(ledger):\n    return ledger.sort_values('pass_rate')",
            "lab.prompts.order = hardest\nlab.prompts.threshold = 0.5",
            "lab.prompts.ledger()",
            "frame = lab.prompts.ledger(by='version')\nframe.head()",
            "batch = lab.prompts.next(2)",
        )
    ).text
    assert "def hardest(ledger):" in script
    assert body(script)[-3:] == [
        "lab.prompts.order = hardest",
        "lab.prompts.threshold = 0.5",
        "batch = lab.prompts.next(2)",
    ]


def test_changes_of_settings_stay_where_they_are() -> None:
    lines = [
        "ppo = wb.PPO(lab)",
        "ppo.run(1)",
        "lab.actor.training.learning_rate = 5e-6",
        "ppo.clip = 0.1",
        "ppo.sampling.temperature = 0.7",
        'ppo.reward_weights = {"format": 0.5}',
        'ppo.reward_weights["right"] = 2.0',
        "ppo.run(1)",
    ]
    for used in (False, True):
        kept = body(script_of(page(IMPORT, OPEN, *lines, "changes = lab.history.changes()"), used=used).text)
        assert kept[-len(lines) :] == lines


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("ppo.run(1)\nlab.iteration, ppo.clip", "ppo.run(1)"),
        ("ppo.run(1), lab.iteration", "ppo.run(1)"),
        ("for _ in range(2):\n    ppo.run(1)\n    lab.iteration, ppo.clip", "for _ in range(2):\n    ppo.run(1)"),
        ("try:\n    lab.reference\nexcept AttributeError:\n    ppo.run(1)", None),
    ],
)
def test_a_tuple_of_values_is_a_display(written: str, kept: str | None) -> None:
    cells = [Cell(1, "import workbench as wb\nlab = wb.open('x')\nppo = wb.PPO(lab)"), Cell(2, written)]
    body = textwrap.dedent(script_of(cells).text.partition("ppo = wb.PPO(lab)\n")[2].partition("\n\n\nif __name__")[0])
    assert body.strip() == (kept or written)


NOT_ENDED: list[tuple[str, Any, list[Any], str, str]] = [
    ("a = 1; b = 2\nc = f()", (2, 4), [], "a = 1; b = 2", ""),
    ("a = 1; b = f(); c = 3", (1, 11), [], "a = 1", ""),
    ("x = ppo.run(10, every=2)", (1, 4), [("ppo", "run", 4, (1, 4))], "ppo.run(4, every=2)", ""),
    ("x = ppo.run(10)", (1, 4), [("ppo", "run", 0, (1, 4))], "", ""),
    ("with lab.overlap():\n    ppo.run(1)\n    ppo.run(9)", (3, 4),
     [("ppo", "run", 1, (2, 4)), ("ppo", "run", 2, (3, 4))],
     "with lab.overlap():\n    ppo.run(1)\n    ppo.run(2)", ""),
    ("while True:\n    ppo.iterate()", (2, 4), [("ppo", "iterate", 1, (2, 4))] * 3,
     "ppo.iterate()\nppo.iterate()\nppo.iterate()", ""),
    ("while True:\n    mine(lab)", (2, 4), [], "", "had called update_actor 3 times"),
    ("for n in range(9):\n    ppo.run(2)\n    look(n)", (3, 4), [("ppo", "run", 2, (2, 4))] * 3,
     "for n in range(2):\n    ppo.run(2)\n    look(n)\nppo.run(2)", ""),
    ("for n in range(9):\n    use(n)\n    ppo.run(2)", (3, 4), [("ppo", "run", 2, (3, 4))] * 2,
     "for n in range(2):\n    use(n)\n    ppo.run(2)\nn = 2\nuse(n)", ""),
]  # fmt: skip


def test_of_a_cell_that_did_not_end_there_is_what_it_did(subtests: pytest.Subtests) -> None:
    for text, failed, calls, done, left in NOT_ENDED:
        with subtests.test(text=text, failed=failed):
            made = Made([
                MadeCall.of("algorithm", {"algorithm": "PPO", "name": name, "call": call, "iterations": n, "at": at,
                                          "done": n == 2 or call == "iterate"})
                for name, call, n, at in calls
            ])  # fmt: skip
            if left:
                made.stages += [((2, 4), "update_actor")] * 3
            found, lacks = done_of(Cell(1, text), failed, made)
            assert "\n".join(line for line in found.splitlines() if not line.strip().startswith("#")) == done
            assert left in " ".join(lacks) and bool(lacks) == bool(left)
