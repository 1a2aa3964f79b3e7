"""Compiled layers give what layers give, whatever the lengths, and are compiled once for all of them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from workbench.errors import BadInput, MissingDependency
from workbench.models.heads import TokenLogProbs
from workbench.models.loading import load_causal_lm
from workbench.models.packing import compile_layers
from workbench.settings.training import Training

PACKS: list[dict[str, Any]] = [
    {"lengths": (30, 20, 9)},
    {"lengths": (31, 17)},
    {"lengths": (8, 9, 10, 11, 12), "after": (-1, 0, 0, -1, 3)},
    {"lengths": (64, 5, 5, 5, 5, 5)},
    {"lengths": (3, 40, 7, 2)},
]


def passes(head: TokenLogProbs) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Log-probabilities and gradients of each pack."""
    device, found = head.model.device, []
    for pack in PACKS:
        tokens = torch.arange(sum(pack["lengths"]), device=device) % 200
        log_probs, _ = head(tokens, positions=torch.arange(len(tokens), device=device), targets=tokens, **pack)
        log_probs.mean().backward()
        gradients = {name: p.grad.cpu().clone() for name, p in head.named_parameters() if p.grad is not None}
        found.append((log_probs.detach().cpu(), gradients))
        head.zero_grad()
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_compiled_layers_give_the_same(device: str) -> None:
    head = TokenLogProbs(load_causal_lm("tiny-llama-tied", device=device))
    expected = passes(head)
    compile_layers(head)
    TokenLogProbs(load_causal_lm("tiny-qwen2"))  # a role that is loaded later leaves attention out of the graphs
    counters.clear()
    found = passes(head)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4
    for (ours, gradients), (theirs, expected_gradients) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-5)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"compile=True, zero_stage=3"):
        Training(compile=True, zero_stage=3)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingDependency, match=r"no C\+\+ compiler"):
        compile_layers(torch.nn.Linear(1, 1))
