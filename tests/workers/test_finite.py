"""Where numbers are first none: in a column, a weight, a module, a loss, a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import StageError
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.workers.hints import first_not_finite
from workbench.workers.roles import RewardWorker


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("finite", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def module_of(lab: wb.Workbench, role: str) -> Any:
    return lab.hosts.backend.host(lab.hosts.infos[0].name).workers[role].engine.module  # type: ignore[attr-defined]


def test_the_first_number_that_is_none() -> None:
    nan, inf = float("nan"), float("inf")
    assert first_not_finite(torch.tensor([1.0, 2.0])) is None
    assert first_not_finite(torch.tensor([1, 2])) is None
    assert first_not_finite(["nan"]) is None
    assert first_not_finite(torch.tensor([1.0, inf, nan])) == (1, None, "inf")
    assert first_not_finite(torch.tensor([[1.0, 2.0], [3.0, nan]])) == (1, None, "nan")
    ragged = Ragged.of([[1.0, 2.0], [], [3.0, nan]], torch.float32)
    assert first_not_finite(ragged) == (2, 1, "nan")
    assert first_not_finite(torch.tensor([3e38, 3e38])) is None  # their sum is infinite


def test_a_weight_that_is_none(lab: wb.Workbench) -> None:
    batch = lab.put(stored())
    weight = dict(module_of(lab, "critic").named_parameters())
    name = next(name for name in weight if "layers.1" in name and "mlp" in name)
    with torch.no_grad():
        before = weight[name].flatten()[0].clone()
        weight[name].view(-1)[0] = float("nan")
    try:
        with expect_error(
            StageError, value="critic.compute_values failed on rank 0: column 'values' holds nan in row 0"
        ):
            lab.critic.compute_values(batch)
        text = str(lab.last_error().error)
        assert "the critic's weight" in text and "layers.1.mlp" in text and "learning_rate" in text
    finally:
        with torch.no_grad():
            weight[name].view(-1)[0] = before
    lab.critic.compute_values(batch)


class Weighted(RewardWorker):
    @wb.register("3D_PROTO", reads=("prompt_ids", "weight"), writes=("rewards",))
    def weigh(self, batch: Shard) -> Output:
        return Output(columns={"rewards": 2 * batch.numbers("weight")})


def test_a_column_of_the_users_own_that_was_read(tmp_path: Path) -> None:
    models = {"actor": TINY, "reward": wb.Model(TINY, worker=Weighted)}
    with tiny_lab("finite-own", tmp_path, backend="inline", models=models) as lab:
        weight = torch.tensor([1.0, 2.0, float("nan"), 4.0])
        with expect_error(StageError, value="holds nan in row 2", rule="read such numbers in that row: 'weight'"):
            lab.reward.weigh(lab.put({**stored(), "weight": weight}))


def test_a_step_that_is_skipped_is_told_and_the_numbers_stay(
    lab: wb.Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    table = stored()
    returns = table["returns"]
    assert isinstance(returns, Ragged)
    worse = returns.values.clone()
    worse[int(returns.lengths[:3].sum())] = 1e30  # row 3, in the second of two minibatches; its square is infinite
    digests = lab.critic.weight_digests()
    metrics = lab.critic.update_critic(lab.put({**table, "returns": returns.like(worse)}))
    assert metrics["skipped/fraction"] == 0.5
    said = capsys.readouterr().err
    assert "critic.update_critic: optimizer step" in said
    assert "its loss is not finite, first in row 3" in said
    assert lab.critic.weight_digests() != digests  # the other minibatch has been learned from
    weight = next(p for n, p in module_of(lab, "critic").named_parameters() if "layers.1.mlp.up" in n)
    hook = weight.register_hook(lambda gradient: gradient * float("nan"))
    try:
        lab.critic.update_critic(lab.put(table))
    finally:
        hook.remove()
    assert "was skipped: the gradient is not finite, first that of" in (said := capsys.readouterr().err)
    assert "layers.1.mlp.up" in said


def test_no_memory_says_what_is_where_and_what_to_turn(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lab.hosts.backend.host(lab.hosts.infos[0].name).workers["critic"].engine  # type: ignore[attr-defined]
    batch = lab.put(stored())

    def large(**inputs: Any) -> Any:
        return torch.empty(2**55, dtype=torch.uint8)

    monkeypatch.setattr(engine, "forward", large)
    with expect_error(StageError, value="failed on rank 0: RuntimeError: .*allocate memory") as caught:
        lab.critic.compute_values(batch)
    for text in (
        "holds ",
        "critic parameters",
        "left on the machine",
        "micro_batch_tokens (now 256)",
        "lab.critic.move",
    ):
        assert text in caught.value.remedy
    with pytest.raises(StageError) as caught:
        lab.critic.update_critic(batch)
    assert "activation_checkpointing=True" in caught.value.remedy
