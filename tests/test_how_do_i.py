"""The page "How do I ...?": each snippet runs after the page's first cell, and gives what its text says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "how_do_i.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
OPENING, *REST = re.split(r"^## ", PAGE, flags=re.M)
SECTIONS = {part.partition("\n")[0]: part for part in REST}
ON_RAY = ("Use eight GPUs from a notebook", "Reattach after a kernel restart")
MOST_LINES = 10  # of an answer's code

# What holds after a snippet, in the names that it has made.
CLAIMS = {
    "Use my parquet file as prompts": "'2 prompts' in repr(mine.prompts) and 'answer' in mine.prompts.next(2).names",
    "Set a system prompt": (
        "all('Answer with a number.' in text for text in chat.prompts.next(2).df()['prompt_text'])"
    ),
    "Use my own chat template": "chat.prompts.next(1).df()['prompt_text'][0] == 'user: 2 + 3?\\nassistant:'",
    "Use a bigger model, from a folder or the hub": (
        "bigger.description.models['actor'].name == 'my-model' and bigger.estimate().peak(0) > 0"
    ),
    "Take my model elsewhere": "wb.Model('to-share') and 'PPO' in Path('to-share/README.md').read_text()",
    "Train a LoRA adapter": "lora.description.actor_is_reference and len(lora.metrics('update_actor')) == 2",
    "Train a reward model": "len(trainer.metrics('update_reward')) == 3 and wb.Model('my-judge')",
    "Use my own loss": "lab.metrics('update_actor').iloc[-1]['optimizer_steps'] > 0",
    "Use my own reward": (
        "abs(batch.df()['rewards'] - batch.df()['rewards/right'] - 0.2 * batch.df()['rewards/vowels']).max() < 1e-6"
    ),
    "Compare formulas with math-verify": (
        "(lambda again: again.df()['rewards'].tolist() == [1.0] * len(again))(lab.reward.compute_reward("
        "batch, function=lambda prompt, response, answer, **row: equal(prompt, f'${answer}.0$', f'${answer}$')))"
    ),
    "Change the learning rate in the middle of a run": (
        "lab.last_metrics['update_actor']['learning_rate'] == 5e-6 and ppo.clip == 0.1"
        " and lab.history.changes()['setting'].nunique() == 3"
    ),
    "Stop when the KL is too high": "0 < len(lab.metrics('update_actor')) - before <= 3",
    "Compare two runs": (
        "len(frame) > 2 and lab.run_folder.name in frame.index[0] and 'settings:' in repr(difference)"
        " and frame.curves('reward').df['mean'].notna().all()"
    ),
    "Compare two settings on the same rollouts": "[*comparison.df.columns] == ['usual', 'careful']",
    "Generate while training": "len(waiting) and len(lab.buffer) == 0 and lab.buffer.waiting == []",
    "Find the longest response": "longest['tokens'] == max(map(len, batch.df()['response_ids']))",
    "Sample at temperature 0": (
        "(lambda again: greedy.df()['response_text'].tolist() == again.df()['response_text'].tolist())("
        "lab.actor.generate_sequences(greedy, temperature=0, max_new_tokens=16))"
    ),
    "Stop at a text": "{*lines.df()['ending']} <= {'stop', 'eos', 'length'}",
    "Choose which prompts come next": "lab.prompts.order is None and lab.prompts.ledger()['responses'].sum() > 0",
    "Talk to my policy": "exchange.rows == 1 and len(start.conversation.chats) == 1",
    "Get the same numbers again": (
        "seeded.actor.generate_sequences(drawn, seed=7, max_new_tokens=16).df()['response_text'].tolist()"
        " == other.df()['response_text'].tolist() != drawn.df()['response_text'].tolist()"
    ),
    "See which rows failed": (
        "True in (short := [len(answer) == 1 for answer in scored.df()['answer']])"
        " and scored.failed().empty and all("
        "(reward < 1) if one else abs(reward - 1 / (len(answer) - 1)) < 1e-6"
        " for one, answer, reward in zip(short, scored.df()['answer'], scored.df()['rewards']))"
    ),
    "See where the time went": "'generate_sequences' in str(whole['stage'].tolist())",
    "Log to TensorBoard or W&B": "[*lab.run_folder.glob('tensorboard/**/*tfevents*')]",
    "Run everything on one GPU": "one.estimate().peak(0) > 0 and set(one.topology()['device']) == {'cpu:0'}",
    "Free GPU memory": "'reference' in lab.groups and batch.id not in set(lab.batches()['batch'])",
    "Save a run, and go on tomorrow": "again.iteration == lab.iteration + 1",
    "Make a script of my notebook": "'wb.PPO(lab).run(1)' in Path('script.py').read_text() and script.told",
}


def code(text: str) -> str:
    return "\n".join(CODE.findall(text))


def test_the_page_answers_twenty_questions_shortly_and_lists_them_all() -> None:
    assert len(SECTIONS) >= 20
    assert CLAIMS.keys() | set(ON_RAY) == SECTIONS.keys()
    assert [title for title in SECTIONS if not 0 < len(code(SECTIONS[title]).strip().splitlines()) <= MOST_LINES] == []
    listed = re.findall(r"\[([^\]]+)\]\(#", OPENING)
    assert sorted(listed) == sorted(title[0].lower() + title[1:] for title in SECTIONS)


def test_the_readme_links_the_page_in_its_first_screen() -> None:
    assert "docs/how_do_i.md" in "\n".join((ROOT / "README.md").read_text().splitlines()[:25])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Names that the page's first cell makes."""
    names: dict[str, Any] = {"Path": Path}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("how"))
        exec(code(OPENING), names)
        texts = [code(OPENING), "wb.PPO(lab).run(1)"]
        cells = [{"cell_type": "code", "metadata": {}, "source": text, "outputs": []} for text in texts]
        Path("notebook.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
        yield names
        names["lab"].close()


def test_the_snippets_give_what_their_text_says(opened: dict[str, Any], subtests: pytest.Subtests) -> None:
    for title in CLAIMS:
        with subtests.test(title):
            assert_claim(title, opened)


def assert_claim(title: str, opened: dict[str, Any]) -> None:
    """Run the snippet, and close what it has opened."""
    text = code(SECTIONS[title])
    if "prompts.parquet" in text:
        text = readable(text, opened["pd"])
    names = {**opened, "before": len(opened["lab"].metrics("update_actor"))}
    try:
        exec(compile(text, title, "exec"), names)
        assert eval(CLAIMS[title], names)
    finally:
        for made in names.values():
            if isinstance(made, wb.Workbench) and made is not opened["lab"]:
                made.close()


def readable(text: str, pandas: Any) -> str:
    """The code, with a file for it to read: one of JSON where nothing here can write Parquet."""
    rows = pandas.DataFrame({"prompt": ["1 + 1 =", "2 + 2 ="], "answer": ["2", "4"]})
    if importlib.util.find_spec("pyarrow"):
        rows.to_parquet("prompts.parquet")
        return text
    rows.to_json("prompts.json", orient="records")
    return text.replace('"prompts.parquet"', '"prompts.json"')


@pytest.mark.thorough  # attaching: tests/kernel/test_attach.py
def test_a_workbench_of_two_devices_is_left_by_its_kernel_and_found_again(tmp_path: Path) -> None:
    first, then = (code(SECTIONS[title]) for title in ON_RAY)
    before = code(OPENING).partition("lab = ")[0]  # the names that a workbench is opened with
    path = f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
    subprocess.run([sys.executable, "-c", f"{path}{before}{first}\nos._exit(0)"], cwd=tmp_path, check=True)
    names: dict[str, Any] = {}
    try:
        exec(f"{before}{then}", names)
        many = names["many"]
        assert many.attached and many.iteration == 2
        assert set(many.topology()["device"]) == {"cpu:0", "cpu:1"}
    finally:
        wb.stop("eight")
