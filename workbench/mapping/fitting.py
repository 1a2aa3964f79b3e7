"""The settings with which models would fit where they do not: each is tried, so that a refusal names what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from workbench.mapping.shapes import Shape
from workbench.mapping.workload import Workload
from workbench.settings.engines import Training

Fits = Callable[[Workload, Mapping[str, Shape], int], bool]
MOST_TIMES = 8  # as many devices as were asked about


def settings_that_fit(fits: Fits, workload: Workload, shapes: Mapping[str, Shape], devices: int) -> list[str]:
    """What to write so that the models fit, as sentences: each setting that is enough by itself, or all of them
    together, and how many devices are enough without any."""
    found, every = [], (workload, dict(shapes))
    changes = list(_changes(workload, shapes))
    for text, change in changes:
        every = change(*every)
        if fits(*change(workload, dict(shapes)), devices):
            found.append(text)
    if not found and len(changes) > 1 and fits(*every, devices):
        found.append(" and ".join(text for text, _ in changes))
    count = devices
    while (count := 2 * count) <= MOST_TIMES * devices:
        if fits(workload, shapes, count):
            found.append(f"{count} devices")
            break
    return found


_Asked = tuple[Workload, dict[str, Shape]]


def _changes(workload: Workload, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Callable[..., _Asked]]]:
    trained = [shape for shape in shapes.values() if shape.role.trained]
    if workload.engine == "workbench" and any(shape.role.engine == "torch" for shape in trained):
        yield 'Workload(engine="cluster"), whose optimizer is cut over replicas', lambda work, some: (
            replace(work, engine="cluster"), some)  # fmt: skip
    if not all(shape.training.activation_checkpointing for shape in trained):
        yield "Training(activation_checkpointing=True)", lambda work, some: _trained(
            work, some, activation_checkpointing=True)  # fmt: skip
    longest = workload.prompt_tokens + max(workload.lengths)
    if any(shape.role.micro_batch_tokens > longest for shape in shapes.values()):
        yield f"Training(micro_batch_tokens={longest})", lambda work, some: _trained(
            work, some, micro_batch_tokens=longest)  # fmt: skip
    if any(shape.role.engine in ("zero0", "zero1", "zero2") for shape in trained):
        yield "Training(zero_stage=3)", lambda work, some: _trained(work, some, zero_stage=3)


def _trained(work: Workload, shapes: dict[str, Shape], **settings: object) -> _Asked:
    """With these settings of training, for every role."""

    def changed(training: Training) -> Training:
        return replace(training, **settings)  # type: ignore[arg-type]

    roles = {name: replace(shape.role, training=changed(shape.training)) for name, shape in shapes.items()}
    return replace(work, training=changed(work.training)), {name: Shape(role) for name, role in roles.items()}
