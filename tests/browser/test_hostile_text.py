"""Text from models, data, names and errors that tries to become a program of the page: a real browser, no mocks.

The page of the first test ignores any Content-Security-Policy, so that nothing but our own escaping protects it. All
tests of this folder run under a policy that forbids inline scripts: see `jupyter_lab`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OPEN = r"""
from pathlib import Path
import warnings
import torch
import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.batches.columns import Ragged
EVIL = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 2'>",
    "\"><svg onload=\"window.hit = 3\">",
    "'><img src='http://192.0.2.1/spy.png'>",
    "</style></textarea></title><iframe srcdoc='<script>parent.hit = 4</script>'></iframe>",
    "[x](javascript:window.hit=5) ![](http://192.0.2.1/spy.png) <a href='javascript:window.hit=6'>x</a>",
    "${window.hit = 7}{{7*7}}&lt;script&gt;",
]
ALL = " ".join(EVIL)
data = [{"prompt": f"{text} {n}", "answer": text, EVIL[n % 3]: text} for n, text in enumerate(EVIL * 2)]
data = [{**{name: "" for name in EVIL[:3]}, **row} for row in data]
def reward(prompt, response, **row):
    return float(len(response))
reward.__name__ = reward.__qualname__ = EVIL[1]
lab = tiny_lab(
    "hostile", Path("runs"), backend="inline", if_exists="replace", prompts=data,
    models={"actor": TINY, "critic": TINY, "reference": TINY, "reward": reward},
)
ppo = wb.PPO(lab, prompts=4, reward=reward, sampling=wb.Sampling(max_new_tokens=6))
"""
WORK = r"""
ppo.iterate()
def spy(prompt, response, **row):
    raise ValueError(ALL)
failed = []
broken = wb.PPO(lab, prompts=2, reward=spy, sampling=wb.Sampling(max_new_tokens=2))
for call in (broken.iterate, lambda: lab.metrics(ALL), lambda: lab.actor.generate_sequences(ALL), lambda: lab.move(ALL),
             lambda: wb.open(ALL, models={"actor": ALL}), lambda: wb.Sampling(temperature=ALL)):
    try:
        call()
    except Exception as error:
        failed.append(error)
batch = ppo.made["compute_advantages"]
said = lab.runner.batches.tokenizer(ALL)["input_ids"]
ids = Ragged.of([list(said)] * 2, torch.int64)
put = lab.put({"prompt_ids": ids, "response_ids": ids, "old_log_prob": ids.like(torch.zeros(len(ids.values))),
               "rewards": torch.zeros(2), EVIL[0]: [ALL, ALL]})
"""
SHOW = r"""
from IPython.display import display
for shown in (lab, ppo, lab.prompts, batch, put, lab.topology(), lab.timeline(), lab.metrics(), *failed):
    display(shown)
raise failed[0]
"""


@pytest.mark.thorough
def test_no_text_becomes_a_program_or_a_request(
    open_notebook: Callable[..., Any], lab_address: tuple[str, Path]
) -> None:
    cells = [OPEN, WORK, SHOW, "panel = lab.panel(algorithm=ppo); panel"]
    notebook: Notebook = open_notebook(cells, bypass_csp=True)
    page, asked = notebook.page, list[str]()
    page.context.on("request", lambda request: asked.append(request.url))
    for cell in (0, 1):
        notebook.run(cell)
    notebook.start(2)
    notebook.wait_until_ended(2)
    assert notebook.ask("len(failed)") >= 5
    assert notebook.ask("'window.hit' in lab.decode(said)")
    panel = notebook.run(3).locator(".wb-panel")
    panel.locator('[data-stage="prompts"]').wait_for()
    for name in panel.get_by_role("tab").all_inner_texts():
        panel.get_by_role("tab", name=name, exact=True).click()
        page.wait_for_function(
            "name => [...document.querySelectorAll('.wb-panel [role=tab][aria-selected=true]')]"
            ".every(tab => tab.innerText === name)", arg=name,
        )  # fmt: skip
        panel.locator(".wb-waiting:visible").wait_for(state="detached")
        notebook.picture(f"hostile_{name.lower()}")
    assert "window.hit" in page.content()  # the texts are there, as text
    assert page.evaluate("window.hit") is None
    programs = "[onerror], [onload], iframe[srcdoc], img[src*='192.0.2.1'], a[href^='javascript:']"
    assert page.locator(programs).count() == 0
    # this page would have run them
    page.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.hit = 2'>`)")
    page.wait_for_function("window.hit === 2")
    ours = urlsplit(lab_address[0]).netloc
    assert {urlsplit(url).netloc for url in asked if urlsplit(url).scheme in ("http", "https", "ws")} == {ours}


def test_the_pages_of_these_tests_forbid_inline_scripts(shared_notebook: Callable[[Sequence[str]], Any]) -> None:
    page = shared_notebook([""]).page
    refused = page.evaluate(
        """() => new Promise(done => {
            document.addEventListener("securitypolicyviolation", event => done(event.effectiveDirective));
            document.body.insertAdjacentHTML("beforeend", "<img src='data:,' onerror='window.hit = 2'>");
        })"""
    )
    assert refused.startswith("script-src")
    assert page.evaluate("window.hit") is None
