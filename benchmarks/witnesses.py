"""Our pure functions against those of libraries of other lineage, on the same random input: a table of differences.

    python benchmarks/witnesses.py [--witnesses FOLDER]

The witnesses (torchrl, verl, trl) live in a folder of their own, which `make witnesses` fills, and are never imported
by the product. These libraries partly follow each other, so agreement is the weaker kind of evidence: the tests of
`tests/algorithms` hold the same functions to enumerations and closed forms. Ends with code 1 where a difference is
larger than rounding.
"""

from __future__ import annotations

import argparse
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.objectives.aggregation import Aggregation, aggregate, denominator
from workbench.objectives.correction import Correction, correct
from workbench.objectives.estimators import gae, moments, overlong_penalty, reinforce, token_rewards, whiten
from workbench.objectives.groups import group_mean, grpo, off_policy_baseline, rloo
from workbench.objectives.kl import KLKind, adaptive_kl_step, divergence, kl_estimate, kl_loss
from workbench.objectives.losses import (
    KLCov,
    cispo_loss,
    covariances,
    gspo_loss,
    held_back,
    kl_cov_loss,
    ppo_loss,
    sapo_loss,
    value_loss,
)
from workbench.objectives.preference import dpo_loss, ipo_loss, kto_loss, orpo_loss, pairwise_loss

ROOT = Path(__file__).resolve().parents[1]
ROWS, TOKENS, SAMPLES = 24, 17, 4
Row = tuple[str, str, float]
KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3")


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LENGTHS = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(TOKENS) < LENGTHS).double()
GROUP = torch.arange(ROWS) // SAMPLES
REWARDS = normal(ROWS, TOKENS, seed=1) * MASK
SCORES = token_rewards(REWARDS.sum(-1), MASK, None, MASK, 0.0)  # the whole score on the last token
VALUES = normal(ROWS, TOKENS, seed=2) * MASK
OLD, REF = normal(ROWS, TOKENS, seed=3) - 2, normal(ROWS, TOKENS, seed=4) - 2
NOW = OLD + normal(ROWS, TOKENS, seed=5, scale=0.4)
ADVANTAGES = normal(ROWS, 1, seed=6).expand(ROWS, TOKENS)  # one a response, as the witnesses have it
VERL_NAMES: dict[Aggregation, str] = {
    "token-mean": "token-mean",
    "sequence-mean-token-mean": "seq-mean-token-mean",
    "sequence-mean-token-sum": "seq-mean-token-sum",
    "fixed-length": "seq-mean-token-sum-norm",
}


def whole(loss_BT: Tensor, how: Aggregation) -> Tensor:
    """The loss of all rows as one minibatch."""
    return aggregate(loss_BT, MASK, how, denominator(MASK, how, TOKENS))


def apart(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> float:
    """The largest difference, relative to the largest value (where that is over 1)."""
    if mask is not None:
        ours, theirs = ours * mask, theirs * mask
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def slopes(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Value and gradient at the current log-probabilities."""
    now = NOW.clone().requires_grad_()
    value = loss(now)
    return value.detach(), torch.autograd.grad(value, now)[0]


def losses_apart(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> float:
    """The larger difference of value and gradient."""
    return max(apart(a, b) for a, b in zip(slopes(ours), slopes(theirs), strict=True))


def against_torchrl() -> Iterator[Row]:
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    for gamma, lam in ((1.0, 0.95), (0.9, 0.5)):
        following = torch.cat((VALUES[:, 1:], torch.zeros(ROWS, 1)), 1)
        done = torch.arange(TOKENS) == LENGTHS - 1
        found = generalized_advantage_estimate(
            gamma, lam, *(x[..., None] for x in (VALUES, following, REWARDS)), done[..., None], done[..., None]
        )
        for name, ours, theirs in zip(("advantages", "returns"), gae(REWARDS, VALUES, MASK, gamma, lam), found):  # noqa: B905
            yield "torchrl", f"GAE {name}, gamma {gamma}, lambda {lam}", apart(ours, theirs[..., 0], MASK)


def against_verl() -> Iterator[Row]:
    import verl.utils.torch_functional as functional
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig, PolicyLossConfig

    index = np.asarray(GROUP)
    white = whiten(REWARDS, MASK, moments(REWARDS, MASK))
    yield "verl", "whitening", apart(white, functional.masked_whiten(REWARDS, MASK), MASK)
    raw, returns = gae(REWARDS, VALUES, MASK, 0.9, 0.5)
    advantages, theirs = verl.compute_gae_advantage_return(REWARDS, VALUES, MASK, 0.9, 0.5)
    yield "verl", "GAE, whitened", apart(whiten(raw, MASK, moments(raw, MASK)), advantages, MASK)
    yield "verl", "GAE returns", apart(returns, theirs, MASK)
    scores = SCORES.sum(-1)
    for name, ours, found in (
        ("GRPO", grpo(scores, GROUP), verl.compute_grpo_outcome_advantage(SCORES, MASK, index)),
        (
            "Dr. GRPO",
            grpo(scores, GROUP, scale_by_std=False),
            verl.compute_grpo_outcome_advantage(SCORES, MASK, index, norm_adv_by_std_in_grpo=False),
        ),
        ("RLOO", rloo(scores, GROUP), verl.compute_rloo_outcome_advantage(SCORES, MASK, index)),
        (  # with equal weights the off-policy baseline is OPO's, scores weighed by lengths
            "off-policy baseline, on policy (OPO)",
            scores - off_policy_baseline(scores, GROUP, torch.ones(ROWS), LENGTHS[:, 0]),
            verl.compute_opo_outcome_advantage(SCORES, MASK, index),
        ),
    ):
        yield "verl", name, apart(ours[:, None].expand(ROWS, TOKENS), found[0], MASK)
    ours, _ = reinforce(REWARDS, MASK, 0.9)
    found = verl.compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK, config=types.SimpleNamespace(gamma=0.9))
    yield "verl", "REINFORCE++", apart(whiten(ours, MASK, moments(ours, MASK)), found[0], MASK)
    ours, _ = reinforce(SCORES, MASK, 1.0, group_mean(scores, GROUP))
    found = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(SCORES.clone(), MASK, index)
    yield "verl", "REINFORCE++-baseline", apart(whiten(ours, MASK, moments(ours, MASK)), found[0], MASK)
    greedy = normal(ROWS, seed=7)
    found = verl.compute_remax_outcome_advantage(REWARDS, greedy, MASK)
    yield "verl", "ReMax", apart(reinforce(REWARDS, MASK, 1.0, greedy)[0], found[0], MASK)

    for how, name in VERL_NAMES.items():
        theirs = verl.agg_loss(NOW, MASK, name, loss_scale_factor=TOKENS)
        yield "verl", f"aggregation {how}", apart(whole(NOW, how), theirs)

    def config(low: float, high: float) -> Any:
        sizes = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": ROWS, "rollout_n": 1}
        chosen = {"policy_loss": PolicyLossConfig(kl_cov_ratio=0.05, ppo_kl_coef=0.7)}
        return ActorConfig(
            strategy="fsdp", clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=3.0, **sizes, **chosen
        )

    def kl_cov(now: Tensor) -> Tensor:
        """With tokens chosen as verl chooses them, by the present log-probabilities; ours are of before the update."""
        held_BT, inside_BT = torch.zeros_like(MASK, dtype=torch.bool), MASK.bool()
        of_tokens = covariances(now[inside_BT], ADVANTAGES[inside_BT])
        held_BT[inside_BT] = held_back(KLCov(share=0.05), of_tokens, torch.Generator())
        return kl_cov_loss(now, OLD, ADVANTAGES, held_BT, 0.7)

    for title, name, loss, low, high in (
        ("PPO, dual clip", "vanilla", lambda now: ppo_loss(now, OLD, ADVANTAGES, 0.2, 0.3, 3.0)[0], 0.2, 0.3),
        ("GSPO", "gspo", lambda now: gspo_loss(now, OLD, ADVANTAGES, MASK, 0.05, 0.1)[0], 0.05, 0.1),
        ("CISPO", "cispo", lambda now: cispo_loss(now, OLD, ADVANTAGES, 0.2, 0.3)[0], 0.2, 0.3),
        ("SAPO", "sapo", lambda now: sapo_loss(now, OLD, ADVANTAGES)[0], 0.2, 0.3),
        ("KL-Cov", "kl_cov", kl_cov, 0.2, 0.3),
    ):
        # verl averages SAPO over sequences whatever is asked for
        for how in ("token-mean", "sequence-mean-token-mean") if name != "sapo" else ("sequence-mean-token-mean",):
            theirs = verl.get_policy_loss_fn(name)
            yield (
                "verl",
                f"{title}: loss and gradient, {how}",
                losses_apart(
                    lambda now: whole(loss(now), how),  # noqa: B023
                    lambda now: theirs(OLD, now, ADVANTAGES, MASK, VERL_NAMES[how], config(low, high))[0],  # noqa: B023
                ),
            )
    theirs = verl.compute_value_loss(NOW, REF, OLD, MASK, 0.2, "token-mean")[0]
    yield "verl", "value loss, clipped", apart(whole(value_loss(NOW, OLD, REF, 0.2)[0], "token-mean"), theirs)
    for kind in KINDS:
        ours = kl_estimate(NOW, REF, kind).clamp(max=10 if kind == "k3" else float("inf"))  # verl cuts its k3 there
        yield "verl", f"KL estimate {kind}", apart(ours, verl.kl_penalty(NOW, REF, kind), MASK)
    controller = verl.AdaptiveKLController(0.1, 6.0, 1000)
    controller.update(8.0, 64)
    yield "verl", "adaptive KL coefficient", abs(adaptive_kl_step(0.1, 8.0, 6.0, 64, 1000) - controller.value)
    for title, settings, level, bounds in (
        ("TIS", Correction(high=1.5), "token", 1.5),
        ("IcePop", Correction(bound="mask", low=0.6, high=1.5), "token", "0.6_1.5"),
        ("sequence TIS", Correction(level="sequence", high=1.5), "sequence", 1.5),
        ("sequence mask", Correction(level="sequence", bound="mask", low=0.6, high=1.5), "sequence", "0.6_1.5"),
    ):
        theirs, _ = compute_rollout_correction_weights(NOW - OLD, MASK, level, bounds)
        yield "verl", f"correction {title}", apart(correct(NOW, OLD, MASK, settings).weight_BT, theirs)


def against_trl() -> Iterator[Row]:
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.reward_trainer import RewardTrainer
    from trl.trainer.utils import selective_log_softmax

    from workbench.models.heads import TokenLogProbs

    yield "trl", "selective log softmax", _head_apart(TokenLogProbs, selective_log_softmax)
    penalties = get_soft_overlong_punishment(TOKENS - 2, 6)([[0] * length for length in LENGTHS[:, 0].tolist()])
    own_penalties = overlong_penalty(LENGTHS[:, 0].double(), TOKENS - 2, 6)
    yield "trl", "overlong penalty", apart(own_penalties, torch.tensor(penalties, dtype=torch.float64))

    def reward_loss(now: Tensor) -> Tensor:
        """RewardTrainer's own loss of pairs: the first two numbers of each row as scores, the third as a margin."""
        scores = torch.cat((now[:, 0], now[:, 1]))[:, None]
        accelerator = types.SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
        stand_in = types.SimpleNamespace(
            args=types.SimpleNamespace(center_rewards_coefficient=None), accelerator=accelerator,
            model=types.SimpleNamespace(training=False), _metrics={"eval": defaultdict(list)}, _total_train_tokens=0,
        )  # fmt: skip
        model = lambda **inputs: types.SimpleNamespace(logits=scores)  # noqa: E731
        return RewardTrainer.compute_loss(stand_in, model, {"margin": REF[:, 2]})

    yield (
        "trl",
        "reward model, with margin: loss and gradient",
        losses_apart(lambda now: pairwise_loss(now[:, 0], now[:, 1], REF[:, 2]).mean(), reward_loss),
    )

    def theirs(now: Tensor, loss_type: str, level: str, beta: float, corrected: bool, high: float) -> Tensor:
        """GRPOTrainer's own loss, with a stand-in for what it asks of a trainer and a model."""
        accelerator = types.SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, gather_for_metrics=lambda x: x
        )
        stand_in = types.SimpleNamespace(
            args=types.SimpleNamespace(use_bias_correction_kl=corrected, delta=None, steps_per_generation=1),
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (now, torch.zeros_like(now), None),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            importance_sampling_level=level, loss_type=loss_type, beta=beta, epsilon_low=0.2, epsilon_high=high,
            use_vllm=False, vllm_importance_sampling_correction=False, _entropy_bonus_enabled=False,
            max_completion_length=TOKENS, current_gradient_accumulation_steps=1, accelerator=accelerator,
            model=types.SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": MASK,
            "advantages": ADVANTAGES[:, 0], "old_per_token_logps": OLD, "ref_per_token_logps": REF,
            "num_items_in_batch": MASK.sum(),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(stand_in, None, inputs)

    def ppo(now: Tensor) -> Tensor:
        return ppo_loss(now, OLD, ADVANTAGES, 0.2, 0.3)[0]

    def gspo(now: Tensor) -> Tensor:
        return gspo_loss(now, OLD, ADVANTAGES, MASK, 0.2, 0.3)[0]

    def cispo(now: Tensor) -> Tensor:
        return cispo_loss(now, OLD, ADVANTAGES, 1.0, 0.3)[0]  # trl's epsilon is the cap itself

    cases: list[tuple[str, Callable[[Tensor], Tensor], Aggregation, tuple[Any, ...]]] = [
        ("GRPO", ppo, "sequence-mean-token-mean", ("grpo", "token", 0.0, False, 0.3)),
        ("DAPO's token mean", ppo, "token-mean", ("dapo", "token", 0.0, False, 0.3)),
        ("Dr. GRPO", ppo, "fixed-length", ("dr_grpo", "token", 0.0, False, 0.3)),
        ("GSPO", gspo, "sequence-mean-token-mean", ("grpo", "sequence", 0.0, False, 0.3)),
        ("CISPO", cispo, "token-mean", ("cispo", "token", 0.0, False, 1.3)),
        ("GRPO + 0.1 k3", lambda now: ppo(now) + 0.1 * kl_loss(now, OLD, REF, "k3"),
         "sequence-mean-token-mean", ("grpo", "token", 0.1, False, 0.3)),
        ("GRPO + 0.1 k3_corrected", lambda now: ppo(now) + 0.1 * kl_loss(now, OLD, REF, "k3_corrected"),
         "sequence-mean-token-mean", ("grpo", "token", 0.1, True, 0.3)),
    ]  # fmt: skip
    for title, ours, how, arguments in cases:
        yield (
            "trl",
            f"{title}: loss and gradient",
            losses_apart(lambda now: whole(ours(now), how), lambda now: theirs(now, *arguments)),  # noqa: B023
        )


def against_trl_preferences() -> Iterator[Row]:
    """Losses of pairs, of rated answers and of a student, by the trainers' own methods.

    The rows are the chosen and then the rejected answers, or rated in turns."""
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    tokens, half, good = LENGTHS[:, 0], ROWS // 2, torch.arange(ROWS) % 3 > 0
    accelerator = types.SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    asked = {
        "aux_loss_enabled": False, "precompute_ref_logps": True, "accelerator": accelerator, "beta": 0.3,
        "model": types.SimpleNamespace(training=False), "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    ids = torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)
    mask = torch.cat((torch.zeros(ROWS, 1), MASK), 1)

    def answers(x: Tensor) -> Tensor:
        return (x * MASK).sum(-1)

    def model_of(now: Tensor) -> Callable[..., Any]:
        nothing = torch.zeros_like(now)
        output = types.SimpleNamespace(
            log_probs=now * MASK, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(),
            log_sum_sq_probs=nothing,
        )  # fmt: skip
        return lambda **inputs: output

    def dpo(now: Tensor, loss_type: str) -> Tensor:
        stand_in = types.SimpleNamespace(
            **asked, _metrics={"eval": defaultdict(list)}, ld_alpha=None, f_divergence_type="reverse_kl",
            loss_types=[loss_type], loss_weights=[1.0], use_weighting=False, label_smoothing=0.0,
        )  # fmt: skip
        ref_chosen, ref_rejected = answers(REF).chunk(2)
        inputs = {
            "input_ids": ids, "attention_mask": ids + 1, "completion_mask": mask, "ref_chosen_logps": ref_chosen,
            "ref_rejected_logps": ref_rejected,
        }  # fmt: skip
        return DPOTrainer._compute_loss(stand_in, model_of(now), inputs, False)

    def kto(now: Tensor) -> Tensor:
        stand_in = types.SimpleNamespace(
            **asked, _metrics={"eval": defaultdict(list)}, calculate_KL=True, loss_type="kto", desirable_weight=1.5,
            undesirable_weight=0.7, _compute_kl_logps=lambda model, batch: answers(OLD),
        )  # fmt: skip
        inputs = {
            "input_ids": ids, "attention_mask": ids + 1, "completion_mask": mask, "label": good,
            "ref_logps": answers(REF), "ref_KL_logps": answers(REF),
        }  # fmt: skip
        return KTOTrainer._compute_loss(stand_in, model_of(now), inputs, False)

    def pair_loss(loss: Callable[..., Any], now: Tensor, **arguments: Any) -> Tensor:
        return loss(*answers(now).chunk(2), *answers(REF).chunk(2), beta=0.3, **arguments)[0].mean()

    def odds(now: Tensor) -> Tensor:
        """ORPO's own odds ratio; its fine-tuning, which TRL takes over other tokens, is left out of both."""
        chosen, rejected = (answers(now) / tokens).chunk(2)
        return -ORPOTrainer.odds_ratio_loss(types.SimpleNamespace(**asked), chosen, rejected)[0].mean()

    def own_odds(now: Tensor) -> Tensor:
        chosen, rejected = answers(now).chunk(2)
        loss, _ = orpo_loss(chosen, rejected, tokens[:half], tokens[half:], 0.3)
        return (loss + chosen / tokens[:half]).mean()

    point = max(0.0, float((answers(OLD) - answers(REF)).mean()))
    lengths = {"chosen_tokens_P": tokens[:half], "rejected_tokens_P": tokens[half:]}
    for title, ours, theirs in (
        ("DPO", lambda now: pair_loss(dpo_loss, now), lambda now: dpo(now, "sigmoid")),
        ("IPO", lambda now: pair_loss(ipo_loss, now, **lengths), lambda now: dpo(now, "ipo")),
        ("ORPO, the odds ratio", lambda now: own_odds(now - 3), lambda now: odds(now - 3)),
        (
            "KTO",
            lambda now: kto_loss(answers(now), answers(REF), good, point, 0.3, 1.5, 0.7)[0].mean(),
            kto,
        ),
    ):
        yield "trl", f"{title}: loss and gradient", losses_apart(ours, theirs)
    for beta in (0.0, 0.3, 1.0):
        yield (
            "trl",
            f"GKD, beta {beta}: divergence and gradient",
            losses_apart(
                lambda now: divergence(REF.log_softmax(-1), now.log_softmax(-1), beta).mean(),  # noqa: B023
                # its batchmean divides by the rows of a [rows, tokens, vocabulary]
                lambda now: GKDTrainer.generalized_jsd_loss(now[:, None], REF[:, None], beta=beta),  # noqa: B023
            ),
        )


def _head_apart(head: Any, selective_log_softmax: Callable[..., Tensor]) -> float:
    """Log-probabilities of a tiny model's tokens: our head, and trl's function on transformers' logits."""
    from workbench.models.loading import load_causal_lm

    model = load_causal_lm("tiny-llama", dtype=torch.float32, device=torch.device("cpu")).eval()
    ids = torch.randint(0, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(27).reshape(3, 9)[:, :-1].flatten()  # the last token of each sequence predicts none
    with torch.no_grad():
        ours, _ = head(model, micro_batch_tokens=64)(
            input_ids=ids.flatten(),
            lengths=(9, 9, 9),
            positions=positions,
            targets=ids[:, 1:].flatten(),
            temperature=0.7,
        )
        logits = model(ids).logits.float()
    return apart(ours, selective_log_softmax(logits[:, :-1], ids[:, 1:], temperature=0.7).flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pure functions with those of other libraries.")
    parser.add_argument("--witnesses", default=str(ROOT / ".witnesses"), help="folder with them (default: .witnesses)")
    folder = parser.parse_args().witnesses
    if not (Path(folder) / "verl").exists():
        sys.exit(f"no verl in {folder}: run `make witnesses`")
    sys.path.append(folder)
    warnings.simplefilter("ignore")
    failed = 0
    print(f"{'witness':8} {'quantity':60} difference")
    for comparison in (against_torchrl, against_verl, against_trl, against_trl_preferences):
        for witness, quantity, difference in comparison():
            # float64 throughout, but for the model and for eps inside a square root or beside it
            right = difference <= 3e-6
            failed += not right
            print(f"{witness:8} {quantity:60} {difference:8.1e}{'' if right else '  <-- more than rounding'}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
