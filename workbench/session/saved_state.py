"""Counters in the registry, from which a later kernel goes on."""

from __future__ import annotations

from workbench.backends import registry
from workbench.batches.store import Weights
from workbench.data.prompt_stream import PromptStream
from workbench.stages.runner import StageRunner


def save_state(runner: StageRunner, prompts: PromptStream) -> None:
    """Keep the counters of a workbench on Ray that this kernel drives."""
    hosts, counters = runner.hosts, runner.counters
    if not hosts.inline and runner.ownership.drives:
        registry.save_state(
            hosts.description.id,
            {
                **counters.state(),
                "batch": counters.batch,
                "drawn": prompts.drawn,
                "prompts": prompts.state,
                "pools_ended": hosts.pools_ended,
                "shard_successors": hosts.shard_successors,
                "iterations_to_skip": counters.iterations_to_skip,
            },
        )


def restore_state(runner: StageRunner, prompts: PromptStream) -> None:
    """Go on from the counters that the kernel before this one kept."""
    hosts, counters = runner.hosts, runner.counters
    state = registry.load_state(hosts.description.id)
    if not state:
        return
    counters.run, counters.batch, counters.iteration = state["run"], state["batch"], state["iteration"]
    # stages of that kernel may have gone on without it: no weights are known to be those of then, and rollout workers
    # are sent the actor's anew
    for role, weights in state["weights"].items():
        counters.weights[role] = Weights.anew(weights["steps"])
    counters.draws[counters.iteration] = state["draws"]
    counters.iterations_to_skip = state["iterations_to_skip"]
    hosts.pools_ended, hosts.shard_successors = state["pools_ended"], dict(state["shard_successors"])
    prompts.drawn, prompts.state = state["drawn"], state["prompts"]
    if prompts.source and state["prompts"]:
        prompts.source.load_state_dict(state["prompts"])
