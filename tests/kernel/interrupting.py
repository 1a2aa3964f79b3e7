"""Stages in a real kernel, interrupted as the stop button does it, at whatever moment; then run again and compared.

What each stage makes is compared with what it made in a run that nobody interrupted: columns bit by bit, metrics all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernel.kernels import Kernel

# Each: what comes before a stage, the stage in a cell, and what is compared afterwards.
STAGES = {
    "generate_sequences": ("", "got = lab.actor.generate_sequences(prompts, **LONG)", "ids(got, 'response_ids')"),
    "compute_reward": ("", "got = lab.reward.compute_reward(made, function=slow, concurrency=1)",
                       "ids(got, 'rewards')"),
    "compute_log_prob": ("", "got = lab.actor.compute_log_prob(made)", "ids(got, 'old_log_prob')"),
    "compute_values": ("", "got = lab.critic.compute_values(made)", "ids(got, 'values')"),
    "update_critic": ("", "got = lab.critic.update_critic(ready, epochs=EPOCHS)",
                      "(dict(got), lab.critic.weights_checksum())"),
    "update_actor": ("", "got = lab.actor.update_actor(ready, epochs=EPOCHS)",
                     "(dict(got), lab.actor.weights_checksum())"),
    "update_actor, awaited": ("", "got = await lab.actor.update_actor.submit(ready, epochs=EPOCHS)",
                              "(dict(got), lab.actor.weights_checksum())"),
    "transition": ("lab.actor.update_actor(ready)", "got = lab.actor.sync_weights()",
                   "max(lab.actor.check_sync()) < 1e-3"),
    "queued": ("first = lab.critic.compute_values.submit(made)", "got = lab.critic.compute_values(made)",
               "ids(got, 'values')"),
}  # fmt: skip

PRELUDE = """
import time
from contextlib import ExitStack
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
from workbench.batches.columns import Ragged
def slow(prompt, response, **row):
    time.sleep(0.05)
    return float(len(response))
def ids(batch, name):
    column = batch.fetch([name])[name]
    return [row.tolist() for row in column.rows()] if isinstance(column, Ragged) else column.tolist()
EPOCHS, LONG = 8, dict(max_new_tokens=60, ignore_eos=True, seed=7)
lab = {open}
prompts = lab.prompts.next(16)
made = lab.actor.generate_sequences(prompts, max_new_tokens=12, seed=3)
ready = lab.critic.compute_values(lab.actor.compute_log_prob(lab.reward.compute_reward(made)))
ready = lab.compute_advantages(ready)
stack = ExitStack()
go_back = stack.enter_context(lab.kept("actor", "critic"))
clean, took = {{}}, {{}}
"""


@dataclass(frozen=True)
class Trial:
    """One interrupt: after how long, what the cell said, how long it took to end, whether all was right afterwards."""

    stage: str
    delay_s: float
    said: str
    ended_s: float
    right: bool


class Interrupting(Kernel):
    """A kernel with a workbench. open: the expression that opens it."""

    def __init__(self, folder: Path, open: str, stages: Sequence[str] = tuple(STAGES)) -> None:
        super().__init__(folder)
        self.run(PRELUDE.format(open=open))
        self.took_s: dict[str, float] = {}
        self.met = 0  # how many trials an interrupt met
        for name in stages:
            before, stage, compared = STAGES[name]
            self.run(before or "pass")
            began = time.monotonic()
            self.run(stage)
            self.took_s[name] = time.monotonic() - began
            self.run(f"clean[{name!r}] = {compared}\ngo_back()")

    def trial(self, name: str, delay_s: float) -> Trial:
        """Interrupt a stage that late after its cell has begun, run it again, and compare."""
        before, stage, compared = STAGES[name]
        self.run(f"got = None\n{before}")
        request = self.start(stage)
        time.sleep(delay_s)
        pressed = time.monotonic()
        self.interrupt()
        error, _ = self.answer_interrupted(request)
        ended_s = time.monotonic() - pressed
        self.met += error is not None
        self.run(f"if got is None: {stage}")  # the kernel drops a cell without an error if its own code was interrupted
        right = self.run(f"print(({compared}) == clean[{name!r}], list(lab.open_runs()) == [])\ngo_back()").split()
        return Trial(name, delay_s, error or "done before", ended_s, right[-2:] == ["True", "True"])

    def random_trial(self, name: str, dice: random.Random) -> Trial:
        """At a moment of the stage that is as likely as any other."""
        return self.trial(name, dice.uniform(0.0, self.took_s[name]))

    def close(self) -> None:
        """End the workbench and the kernel."""
        try:
            self.run("stack.close(); lab.close()")
        finally:
            self.kill()
