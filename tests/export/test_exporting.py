"""What stays of a notebook in a script, and where it stands there."""

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
from workbench.export.cells import Cell, read_notebook
from workbench.export.exporting import script_of
from workbench.export.interrupted import Made, MadeCall, done_of
from workbench.export.selection import SHOWING

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
def test_lessons_are_exported(subtests: pytest.Subtests, lessons: list[Path]) -> None:
    for lesson in lessons:
        with subtests.test(lesson=lesson):
            script = script_of(read_notebook(lesson).cells)
            compile(script.text, lesson.name, "exec")
            assert not re.search(r"lab\.panel\(|IPython|display\(", script.text)
            assert len(script.parameters) >= 3


LEFT_OUT = """lab
lab.iteration, ppo.clip
lab.memory()
batch.peek(5)[["prompt", "rewards"]]
lab.prompts.ledger(by="version").head()
lab.buffer.groups()
batch["rewards"] > 1
f"{lab.iteration} of {n}"
lab.transfers().groupby("source")["moved_bytes"].sum().reset_index()
lab.panel("samples").show("samples", batch=batch.id)
ppo.graph()
frame.head(3)
display(frame.describe(), HTML("x"))
clear_output()"""
KEPT = [  # as they stand
    "lab.critic.update_critic(batch)", "ppo.iterate()", "lab.drop('critic')", "lab.actor.mean()", "group.count(2)",
    "frame.to_csv('a.csv')", "np.add(a, a, a)", "sorted(rows, key=mine)", "frame['x'].map(mine)", "next(rows)",
    "1 in rows", "queue.get()", "lab.apply(note)", "mine.timeline()", "client.fetch('b')", "lab.memory(next(rows))",
    "lab.prompts.order = note", "ppo.sampling.temperature = 0.7", "lab.buffer.clear(older_than=4)",
    "print(lab.memory())", "history = ppo.run(1)", "frame = lab.metrics()", "lab.timeline(*rows)",
]  # fmt: skip
SHORTENED = {  # what shows the result of a call that does something is gone, the call is not
    "ppo.run(2)[['a', 'b']].head()  # of two": "ppo.run(2)  # of two",
    "lab.actor.measure(batch).peek(3)[['x']]": "lab.actor.measure(batch)",
    "ppo.run(3), lab.iteration": "ppo.run(3)",
    "display(ppo.run(4))": "ppo.run(4)",
    "HTML(ppo.run(5).describe())": "ppo.run(5)",
    "for x in range(2):\n    display(x)\n    ppo.step()": "for x in range(2):\n    ppo.step()",
    "display(n, metadata=ppo.run(7))": "ppo.run(7)",
    "HTML(*ppo.run(8))": "HTML(*ppo.run(8))",
    "if n:\n    display(batch)": "if n:\n    pass",
    "try:\n    lab.reference\nexcept AttributeError:\n    ppo.run(6)": (
        "try:\n    lab.reference\nexcept AttributeError:\n    ppo.run(6)"
    ),
}


def test_only_bare_expressions_that_show_something_are_left_out() -> None:
    start = "class Mine(wb.PPO):\n    def timeline(self):\n        return self.run(1)"
    made = [*(f"{name} = wb" for name in ("ppo", "batch", "frame", "a", "group", "queue", "note", "client", "mine"))]
    imports = f"{IMPORT}\nimport numpy as np\nfrom IPython.display import HTML"
    cells = [imports, OPEN, start, "\n".join(made), "n, rows = 1, []"]
    whole = script_of(page(*cells, "\n".join(LEFT_OUT.splitlines()), "lab.close()"))
    assert body(whole.text)[-2:] == ["n, rows = 1, []", "lab.close()"]
    assert "IPython" not in whole.text and "numpy" not in whole.text
    text = script_of(page(*cells, *SHORTENED, "\n".join(KEPT))).text.partition("n, rows = 1, []\n")[2]
    lines = [line for line in textwrap.dedent(text.partition("\n\n\nif")[0]).splitlines() if line]
    assert "\n".join(lines).replace('"', "'") == "\n".join([*SHORTENED.values(), *KEPT])


def test_what_needs_a_notebook_is_left_out_also_where_it_has_a_name() -> None:
    named = [
        "panel = lab.panel()\npanel.show('timeline')",
        "script = lab.export('x.py')\nprint(script.text, *script.told)",
    ]
    cells = [IMPORT, OPEN, *named, "lab.close()"]
    text = script_of(page(*cells)).text
    assert body(text)[-1] == "lab.close()" and not re.search("panel|script =|told", text)
    with expect_error(BadInput, value="cell 6 needs 'script'", rule="cell 4 .* left out", remedy="skip-export"):
        script_of(page(*cells, "told = list(script.told)"))
    assert "told" not in script_of(page(*cells, ("told = list(script.told)", "skip-export"))).text
    for both in ("print(ppo.run(1), script.told)", "x = ppo.run(1), script"):  # it does more
        with expect_error(BadInput, value="cell 7 needs 'script'"):
            script_of(page(*cells, "ppo = wb.PPO(lab)", both))
    assert "ppo.run(2)" in script_of(page(*cells, "ppo = wb.PPO(lab)", "ppo.run(2), panel")).text
    with expect_error(BadInput, value="cell 4 needs 'script'"):  # a name of two things
        script_of(page(*cells, "script = 'other'\nprint(script)"))


def test_imports_are_sorted_and_those_for_looking_go() -> None:
    imports = "import pandas as pd\nimport torch, os\nfrom math import pi, e\nimport plugin"
    looks = "from plotly import express as px, io\nimport matplotlib.pyplot as plt\nplt.show()"
    script = script_of(page(imports, looks, "io.renderers.default = 'png'\nos.environ['A'] = str(pi)")).text
    head = [line for line in script.split("def main")[0].splitlines() if line]
    assert head == [
        "import os", "from math import pi", "import plugin", "from plotly import io", "import workbench as wb",
    ]  # fmt: skip
    texts = "import json, time\nfrom typing import Any\ndef f(x: 'Any') -> 'time.struct_time | None':\n    'json'"
    script = script_of(page(IMPORT, texts, "print(f(1))")).text  # what reads annotations looks such names up
    assert "import time\nfrom typing import Any" in script and "import json" not in script


def test_a_script_without_options_says_which_it_could_have() -> None:
    texts = ["MODEL = 'tiny-llama'  # the actor's\nSTEPS, seen = 3, []\nrate = 1e-5\nn = 0", IMPORT, OPEN]
    use = "n += 1\nlab.report(MODEL, {'n': rate * n})\nlab.close()"
    script = script_of(page(("# Title",), *texts, use))
    hint = "This script has no options of its own. MODEL, rate (cell 2) become"
    assert [told for told in script.told if told.startswith(hint) and told.endswith("`--parameters MODEL rate`")]
    head = " ".join(line.lstrip("# ") for line in script.text.split("import workbench")[0].splitlines())
    assert "This script has no options of its own. MODEL, rate become options if their cell in the" in head
    formatted = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "--check", "-"]
    subprocess.run(formatted, input=script.text, text=True, check=True)
    tagged = script_of(page((texts[0], "parameters"), *texts[1:], use))
    for other in (tagged, script_of(page(*texts, use), parameters=["rate"])):
        assert other.parameters and "options" not in str(other.told) + other.text
    assert script_of(page(IMPORT, OPEN, "lab.close()")).told == ()


def test_what_is_timed_is_left_out_and_told() -> None:
    timed = "%timeit -n 3 lab.memory()\nfor _ in range(2):\n    %timeit sum([1])\nlab.close()"
    text = "text = '''\n%timeit not a line of it\n'''\nlab.report(text, {})"
    script = script_of(page(IMPORT, OPEN, timed, "%%timeit -r 2\nlab.memory()", text, ("%timeit 3", "skip-export")))
    assert [told for told in script.told if "left out" in told] == [
        "cell 3: `%timeit -n 3 lab.memory()` is left out, with the code that it runs",
        "cell 3: `%timeit sum([1])` is left out, with the code that it runs",
        "cell 4: `%%timeit -r 2` is left out, with the code that it runs",
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
    elsewhere = {"weight_digests", "turns", "dial", "what_if"}  # of the workers; of a conversation; wb's; wb.mapping's
    assert SHOWING - elsewhere <= there


def test_only_what_came_from_the_workbench_is_known_to_show() -> None:
    tracks = "tracker.metrics(loss=1.0)\nTracker().select(3)\nframe.runs()"
    made = "tracker = Tracker(lab)\nframe = lab.metrics()\nframe = tracker.of(frame)"
    cells = page(
        f"{IMPORT}\nfrom tools import Tracker", f"{OPEN}\n{made}",
        f"{tracks}\nlab.metrics().head()\nwb.dial(lab)\nwb.mapping.what_if(models)",
        "runs = wb.runs()\nruns.metrics()\nlab.close()",
    )  # fmt: skip
    assert body(script_of(cells).text)[-5:] == [*tracks.splitlines(), "runs = wb.runs()", "lab.close()"]


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
            "class C:\n    def f(self, x=LIMIT):\n        return a(x)",
            "def d():\n    return b(C().f(1))",
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
    for change in ("lab.drop('critic')", "lab.add('cost', 'tiny-llama')"):  # the models at opening are others
        moved = script_of(page(IMPORT, OPEN, change, "lab.move(wb.Placement.split(2))"))
        assert "lab.move(wb.Placement.split(2))" in moved.text and "roles are added or dropped" in moved.told[0]
        changed = script_of(page(IMPORT, OPEN, change), placements={"x": 'wb.Placement.of({"a": (1, ["actor"])})'})
        assert "Placement.of" not in changed.text and not changed.told


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


# text; place that failed; calls of algorithms, with their iterations and places; places of `update_actor`; what is kept
NOT_ENDED: list[tuple[str, Any, list[Any], list[Any], str, str]] = [
    ("a = 1; b = 2\nc = f()", (2, 4), [], [], "a = 1; b = 2", ""),
    ("a = 1; b = f(); c = 3", (1, 11), [], [], "a = 1", ""),
    ("x = ppo.run(10, every=2)", (1, 4), [("run", 4, (1, 4))], [(1, 4)], "ppo.run(4, every=2)", ""),
    ("ppo.run(iterations=10, every=2)[['loss']].head()", (1, 0), [("run", 4, (1, 0))], [], "ppo.run(4, every=2)", ""),
    ("a = 1\nx = ppo.run(10)", (2, 4), [("run", 0, (2, 4))], [], "a = 1", ""),
    ("a = 1; ppo.iterate()", (1, 7), [("iterate", 1, (1, 7))], [(1, 7)], "a = 1\nppo.iterate()", ""),
    ("f(update(b), ppo.run(10))", (1, 13), [("run", 4, (1, 13))], [(1, 2), (1, 13)], "",
     "`f(update(b), ppo.run(10))` is not in the script; it had called update_actor 2 times"),
    ("a = 1\nmine(ppo)", (2, 0), [("run", 4, (2, 0))], [(2, 0)] * 4, "a = 1",
     "`mine(ppo)` is not in the script; it had called update_actor 4 times"),
    ("with lab.overlap():\n    ppo.run(1)\n    ppo.run(9)", (3, 4),
     [("run", 1, (2, 4)), ("run", 2, (3, 4))], [(2, 4), (3, 4), (3, 4)], "",
     "`with lab.overlap():` is not in the script; it had called update_actor 3 times"),
    ("while True:\n    ppo.iterate()", (2, 4), [("iterate", 1, (2, 4))] * 3, [(2, 4)] * 3, "",
     "`while True:` is not in the script; it had called update_actor 3 times"),
    ("a = 1\nfor n in range(9):\n    mine(lab)", (3, 4), [], [(3, 4)] * 2, "a = 1",
     "`for n in range(9):` is not in the script; it had called update_actor 2 times"),
    ("if a:\n    update(b)\n    look(b)", (3, 4), [], [(2, 4)], "",
     "`if a:` is not in the script; it had called update_actor 1 time"),
    ("if a:\n    lab.move(p)\n    look(b)", (3, 4), [("move", 0, (2, 4))], [], "", "it had called move 1 time"),
    ("for n in range(9):\n    f(n)", (2, 4), [], [], "", "`for n in range(9):` is not in the script; it had called no"),
    ("a = 1\nupdate(b)", (2, 0), [], [(2, 0)], "a = 1", ""),  # the one call that failed
    ("mine(lab)", None, [], [(1, 0)], "", "its effect is unknown; it had called update_actor 1 time"),
    ("no Python +", None, [], [], "", ""),
]  # fmt: skip


def test_of_a_cell_that_did_not_end_there_is_what_it_did(subtests: pytest.Subtests) -> None:
    for text, failed, calls, stages, done, left in NOT_ENDED:
        with subtests.test(text=text, failed=failed):
            of_ppo = {"algorithm": "PPO", "name": "ppo", "done": False}
            made = Made(
                [
                    MadeCall.of("algorithm", {**of_ppo, "call": call, "iterations": n, "at": at})
                    for call, n, at in calls
                ],
                [(at, "update_actor") for at in stages],
            )
            found, lacks = done_of(Cell(1, text), failed, made)
            assert "\n".join(line for line in found.splitlines() if not line.startswith("#")) == done
            assert left in " ".join(lacks) and bool(lacks) == bool(left)


def test_of_a_run_that_was_interrupted_there_are_iterations_and_stages() -> None:
    details = {"algorithm": "PPO", "name": "ppo", "call": "run", "iterations": 2, "at": (1, 0), "done": False}
    ahead = {**details, "staleness": 2, "pause_after": 8}
    made = Made([MadeCall.of("algorithm", ahead)])
    found, _ = done_of(Cell(1, "ppo.run(9, staleness=2, pause_after=8)"), (1, 1), made)
    assert found.splitlines()[-1] == "ppo.run(2, staleness=2, pause_after=8)"
    call = MadeCall.of("algorithm", {**details, "stages": ["prompts", "generate_sequences"], "under_way": True})
    found, _ = done_of(Cell(1, "ppo.run(9)"), (1, 0), Made([call]))
    assert (
        found
        == """# interrupted: this is what it did
ppo.run(2)
for _ in range(2):
    ppo.step()  # prompts, generate_sequences"""
    )
    # stages made of the third iteration; calls of `update_critic`; arguments; what is said
    cases: list[tuple[tuple[str, ...], int, str, list[str]]] = [
        (("prompts", "compute_advantages"), 3, "", ["the optimizer steps that update_critic had taken"]),
        (("demonstrations",), 3, "", ["the optimizer steps that update_critic had taken"]),
        (("demonstrations", "set_aside"), 2, "", []),  # it had not come to the update
        (("prompts", "generate_sequences"), 2, ", staleness=1", ["generated ahead"]),
    ]
    for stages, updates, arguments, said in cases:
        call.stages, call.arguments = stages, arguments
        _, lacks = done_of(Cell(1, "ppo.run(9)"), (1, 0), Made([call], [((1, 0), "update_critic")] * updates))
        assert len(lacks) == len(said) and all(part in one for part, one in zip(said, lacks, strict=True))
    call.finished_later = True
    found, _ = done_of(Cell(1, "ppo.run(9)"), (1, 0), Made([call]))
    assert found == "# interrupted: this is what it did; the next run finishes its last iteration\nppo.run(2)"
