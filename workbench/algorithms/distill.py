"""On-policy distillation: GKD (Agarwal et al. 2023, arXiv:2306.13649) on the student's own responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged
from workbench.data.prompt_stream import PromptStream
from workbench.data.user_functions import accepted
from workbench.models.loading import Limits
from workbench.settings.engines import Sampling
from workbench.support.validation import PositiveInt
from workbench.workers.user_loss import check_names


@dataclass
class Distill(Algorithm):
    """`Distill(lab).run(n)`: n iterations of the lines in `define`. The actor is the student.

    The student answers prompts, the teacher computes its own distribution at each token of the answers, and the student
    learns that distribution. To distill on given answers, call `lab.teacher.compute_teacher_log_prob` and
    `lab.actor.update_distill` on `lab.demonstrations(...).next(64)`.

    prompts: prompts per iteration; samples: responses per prompt. beta: 1 for the reverse KL, 0 for the forward KL,
    between them the generalised Jensen-Shannon divergence. top_k: at each position, the teacher's k likeliest tokens
    are separate outcomes; all other tokens are one outcome. teacher: the teacher's role. teacher_prompt: a function
    that returns the teacher's prompt, a text or messages; it is called in the notebook, with `prompt` and the data
    set's other columns by name. None: the student's prompt. epochs: over each batch.

    Self-distillation: the teacher is the same model, but teacher_prompt shows it more than the student, for example the
    answer. With teacher="reference", the teacher of an actor with an adapter is the model without the adapter.

    The teacher needs the actor's tokenizer: `wb.open` refuses another one. Models of one family may differ in the
    number of token ids beyond the tokenizer's; ids that the student does not have are left out.
    """

    lab: Lab
    prompts: PositiveInt = 64
    samples: PositiveInt = 1
    sampling: Sampling = field(default_factory=Sampling)
    beta: float = 1.0
    top_k: int = 64
    teacher: Literal["teacher", "reference"] = "teacher"
    teacher_prompt: Callable[..., Any] | None = None
    epochs: PositiveInt = 1
    _keep_rows = ("tell_teacher",)

    def __post_init__(self) -> None:
        source = self.lab.prompts.source if isinstance(getattr(self.lab, "prompts", None), PromptStream) else None
        if self.teacher_prompt and source is not None:
            check_names("teacher_prompt", self.teacher_prompt, ("prompt",), source.extra_columns)
        self.need("actor", self.teacher)

    def define(self, lab: Lab) -> None:
        batch = lab.prompts.next(self.prompts)
        batch = lab.actor.generate_sequences(batch, samples=self.samples, **asdict(self.sampling))
        if self.teacher_prompt:
            batch = lab.apply(self.tell_teacher, batch)
        batch = getattr(lab, self.teacher).compute_teacher_log_prob(
            batch,
            top_k=self.top_k,
            vocabulary=self._vocabulary(),
            prompt="teacher_prompt_ids" if self.teacher_prompt else "prompt_ids",
        )
        lab.actor.update_distill(batch, beta=self.beta, epochs=self.epochs)

    def tell_teacher(self, batch: Batch) -> Batch:
        """Return the batch with `teacher_prompt_ids`, which the teacher reads instead of the prompt."""
        assert self.teacher_prompt is not None and self.lab.prompts.source is not None
        prompts, told = self.lab.prompts.source, []
        columns = batch.fetch(["prompt", *(name for name in prompts.extra_columns if name in batch.names)])
        for row in range(batch.rows):
            values = {name: column[row] for name, column in columns.items() if not isinstance(column, Ragged)}
            given = self.teacher_prompt(**accepted(self.teacher_prompt, values))
            told.append(prompts.render(given, f"what teacher_prompt returned for row {row}"))
        return batch.join(self.lab.put({"teacher_prompt_ids": Ragged.of(told, torch.int64)}))

    def _vocabulary(self) -> int | None:
        """The student's number of token ids if the teacher has more; else None."""
        own, theirs = (
            Limits.of(self.lab.groups[role].spec.name).vocabulary  # type: ignore[arg-type]
            for role in ("actor", self.teacher)
        )
        return own if own is not None and theirs is not None and own < theirs else None
