"""What is printed when a workbench has been opened."""

from __future__ import annotations

from workbench.controller import Workbench
from workbench.data.prompts import Prompts
from workbench.models.template_doubts import template_doubts
from workbench.support.notebook_cell import in_notebook


def say_at_opening(lab: Workbench) -> None:
    """Print what a user should know before the first stage: how prompts were read, doubtful settings, how long it
    lives."""
    description = lab.description
    for told in _about_prompts(lab):
        print(told)
    for role, model in description.models.items():
        if model.trained and model.training is not None and (doubt := model.training.doubt(role)):
            print(doubt)
    if in_notebook() and description.backend == "ray":
        name = lab.name
        print(f"{name} lives on when this kernel ends (wb.attach({name!r})), until lab.close() or `wb stop {name}`")


def _about_prompts(lab: Workbench) -> list[str]:
    """How the rows were read, and what would go wrong with them without a word."""
    source = lab.prompts.source
    read = [f"prompts are read as {source.read_as}"] if source is not None and source.read_as else []
    first = source.at(source.position) if isinstance(source, Prompts) else None
    known = (first.prompt_ids, first.prompt) if first is not None else ()
    return read + template_doubts(lab.runner.batches.tokenizer, *known)
