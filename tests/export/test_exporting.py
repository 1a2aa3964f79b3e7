"""What stays of a notebook in a script, where it stands there, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.test_adversarial import page
from workbench.errors import BadInput
from workbench.export.back import notebook_of
from workbench.export.cells import Cell, read_notebook
from workbench.export.exporting import script_of
from workbench.export.kinds import LAB_LOOKS
from workbench.export.looking import frame_looks

LESSONS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
OPEN = 'lab = wb.open("x", models={"actor": "tiny-llama"}, placement=wb.Placement.colocate(1), prompts=["a"])'
IMPORT = "import workbench as wb"


def body(script: str) -> list[str]:
    """The lines of main."""
    lines = script.split("def main(")[1].split("if __name__")[0].split("-> None:\n")[1]
    return [line.strip() for line in lines.splitlines() if line.strip()]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_lessons_come_back_as_they_went(lesson: Path, tmp_path: Path) -> None:
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
        'history = ppo.run(2)[["a", "b"]].head()',
        "ppo.run(3)",
        "lab.close()",
    ]


def test_methods_that_only_look_are_methods() -> None:
    from workbench.algorithms.loop import Algorithm
    from workbench.batches.batch import Batch
    from workbench.controller import Workbench
    from workbench.stages.group import WorkerGroup

    there = {name for owner in (Workbench, Batch, Algorithm, WorkerGroup) for name in dir(owner)}
    assert LAB_LOOKS - {"weight_digests"} <= there  # an operation of the workers


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
    with pytest.raises(BadInput, match=r"parameter 'LR'.*STEPS"):
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
    with pytest.raises(BadInput, match="no function that is run"):
        notebook_of("x = 1\n")
    with pytest.raises(BadInput, match="without a default"):
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
    assert set(dir(FilePath)) & frame_looks() <= {"rename"}
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
