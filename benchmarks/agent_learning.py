"""Whether a small model learns to use a tool: products that it cannot compute in its head, and a calculator.

    make bench NAME=agent_learning ARGS="--seeds 0 1 2"

SmolLM2-135M does not know the format of tool calls, so that it would never earn anything: it first sees a few
demonstrations (supervised, without the tool's own tokens). Then GRPO with the tool: the reward is 1 for the right
product as the last answer. Held out: products that training never sees, before, after the demonstrations, and after.

Writes curves.csv (a row an iteration) and result.json into runs/agent_learning/.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from benchmarks.curves import Curve, each_seed, new_folder  # noqa: E402
from workbench.batches.columns import Ragged, Table  # noqa: E402
from workbench.launch.doctor import bf16_is_fast  # noqa: E402
from workbench.models import load_tokenizer  # noqa: E402
from workbench.models.tokenizers import render_prompt, render_reply  # noqa: E402
from workbench.support.machine import read_gpus  # noqa: E402

SYSTEM = (
    "You compute with a tool. To use it write <tool_call>\n"
    '{"name": "multiply", "arguments": {"a": 1, "b": 2}}\n</tool_call>. Then answer with the number only.'
)
SHOWN = {
    "reward": "compute_reward/rewards/mean",
    "turns": "generate_sequences/turns/mean",
    "response_tokens": "generate_sequences/response_tokens/mean",
    "rollout_gap": "/rollout_gap/mean",
    "grad_norm": "/grad_norm",
}
MAX_TURNS, MAX_NEW_TOKENS = 3, 160


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


class Multiplies:
    """The calculator: answers calls, and ends with the first turn that has none, which earns 1 if it is right."""

    tool_format = "hermes"

    def reset(self, prompt: str, answer: str) -> list[dict[str, str]]:
        self.answer = answer
        return messages(prompt)

    def step(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        calls = message.get("tool_calls") or message.get("invalid_tool_calls")
        if not calls:
            numbers = re.findall(r"\d+", message["content"].replace(",", ""))
            return None, float(bool(numbers) and numbers[-1] == self.answer), True
        return [{"role": "tool", "content": self.computed(calls[0])}], 0.0, False

    @staticmethod
    def computed(call: dict[str, Any]) -> str:
        try:
            function = call["function"]
            a, b = (int(function["arguments"][name]) for name in "ab")
        except (KeyError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__}"
        return str(a * b) if function["name"] == "multiply" else f"error: no tool {function['name']}"


def product(environment_rewards: Sequence[float], **row: Any) -> float:
    """The environment's."""
    return float(sum(environment_rewards))


def problems(seed: int, n: int, but: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """Products of two numbers of two and three digits, none of them twice or in `but`."""
    draws, found = random.Random(seed), dict[str, str]()
    while len(found) < n:
        a, b = draws.randrange(101, 1000), draws.randrange(11, 100)
        if (prompt := f"What is {a} times {b}?") not in but:
            found[prompt] = str(a * b)
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]


def demonstrations(tokenizer: Any, rows: Sequence[dict[str, str]]) -> Table:
    """Conversations as they should go, outside the mask what the tool writes."""
    end = int(tokenizer.eos_token_id)
    columns: dict[str, list[list[Any]]] = {"prompt_ids": [], "response_ids": [], "response_mask": []}

    def turn(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), end]

    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["prompt"]))
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        asked, said = turn(f"<tool_call>\n{call}\n</tool_call>"), turn(row["answer"])
        heard = render_reply(tokenizer, [{"role": "tool", "content": row["answer"]}], after=end)
        columns["prompt_ids"].append(render_prompt(tokenizer, messages(row["prompt"])))
        columns["response_ids"].append(asked + heard + said)
        columns["response_mask"].append([True] * len(asked) + [False] * len(heard) + [True] * len(said))
    kinds = {"response_mask": torch.bool}
    return {name: Ragged.of(lists, kinds.get(name, torch.int64)) for name, lists in columns.items()}


def open_lab(arguments: argparse.Namespace, seed: int, folder: Path, prompts: Any) -> wb.Workbench:
    training = wb.Training(engine="torch", learning_rate=arguments.rate, minibatches=2, micro_batch_tokens=4096)
    return wb.open(
        "agent-learning",
        models={"actor": wb.Model(arguments.model, training=training, seed=seed), "reward": product},
        prompts=prompts,
        generation=wb.Generation(engine=arguments.generation, max_model_tokens=320, max_rows=max(64, arguments.rows)),
        dtype="bfloat16" if bf16_is_fast(read_gpus()) else "float32",
        backend="inline",
        seed=seed,
        if_exists="replace",
        runs=folder,
    )


def learn(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[Curve, dict[str, Any]]:
    """One seed: the curve, and what came of it."""
    held_out = problems(10_000, arguments.held_out)
    known = frozenset(row["prompt"] for row in held_out)
    shown = problems(20_000 + seed, arguments.warm_up * arguments.rows, known)
    prompts = problems(30_000 + seed, arguments.iterations * arguments.rows // arguments.samples, known)
    sampling = wb.Sampling(environment=Multiplies, max_turns=MAX_TURNS, max_new_tokens=MAX_NEW_TOKENS, concurrency=32)
    with open_lab(arguments, seed, folder, prompts) as lab:

        def success() -> float:
            return float(lab.evaluate(held_out, samples=1, sampling=sampling).iloc[0]["reward_mean"])

        result, curve = {"seed": seed, "before": success()}, Curve(seed, arguments.iterations, tuple(SHOWN))
        tokenizer = load_tokenizer(arguments.model)
        for step in range(arguments.warm_up):
            rows = shown[step * arguments.rows : (step + 1) * arguments.rows]
            lab.actor.update_sft(lab.put(demonstrations(tokenizer, rows)))
        result["after_demonstrations"] = success()
        print(f"seed {seed}: {result}", flush=True)
        grpo = wb.GRPO(lab, prompts=arguments.rows // arguments.samples, samples=arguments.samples, sampling=sampling)
        for iteration in range(1, arguments.iterations + 1):
            metrics = grpo.iterate()
            found = ((name, [v for k, v in metrics.items() if k.endswith(ending)]) for name, ending in SHOWN.items())
            curve.tell(iteration, "training", {name: values[0] for name, values in found if values})
        return curve, {**result, "after": success()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--warm-up", type=int, default=3, help="batches of demonstrations")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64, help="responses per iteration")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument("--held-out", type=int, default=100, help="number of evaluation problems")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--generation", default="vllm", choices=("vllm", "transformers"))
    arguments = parser.parse_args()
    folder = new_folder(Path("runs"), "agent_learning")
    for _, result in each_seed(arguments, folder, learn):
        print(
            f"seed {result['seed']}: products right on held-out problems: {result['before']:.2f} at first, "
            f"{result['after_demonstrations']:.2f} after {arguments.warm_up} batches of demonstrations, "
            f"{result['after']:.2f} after {arguments.iterations} iterations of GRPO"
        )


if __name__ == "__main__":
    main()
