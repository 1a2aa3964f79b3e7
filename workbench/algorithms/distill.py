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

    The student answers prompts, the teacher says at each token of the answers which tokens it would have taken, and the
    student learns that distribution. `lab.teacher.compute_teacher_log_prob` and `lab.actor.update_distill` do the same
    on `lab.demonstrations(...).next(64)`, which is distillation on given answers.

    prompts: prompts an iteration; samples: responses a prompt. beta: 1 for the reverse KL, 0 for the forward KL,
    between them the generalised Jensen-Shannon divergence. top_k: the teacher's likeliest tokens at each position,
    which are told apart; all others are one more outcome. teacher: the role that is asked. teacher_prompt: a function
    that gives the prompt which the teacher reads, a text or messages; it is called in the notebook, with `prompt` and
    the data set's other columns by name. None: the student's prompt. epochs: over each batch.

    Self-distillation: the same model as teacher, which sees more than the student, such as the answer
    (teacher_prompt); with teacher="reference" an actor with an adapter has the model under it as its teacher.

    The teacher needs the actor's tokenizer: `wb.open` refuses another one. Models of one family may differ in the
    number of token ids beyond it; those that the student lacks are left out.
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
        """The batch with what the teacher reads in place of the prompt, `teacher_prompt_ids`."""
        assert self.teacher_prompt is not None and self.lab.prompts.source is not None
        prompts, told = self.lab.prompts.source, []
        columns = batch.fetch(["prompt", *(name for name in prompts.extra_columns if name in batch.names)])
        for row in range(batch.rows):
            values = {name: column[row] for name, column in columns.items() if not isinstance(column, Ragged)}
            given = self.teacher_prompt(**accepted(self.teacher_prompt, values))
            told.append(prompts.render(given, f"what teacher_prompt returned for row {row}"))
        return batch.join(self.lab.put({"teacher_prompt_ids": Ragged.of(told, torch.int64)}))

    def _vocabulary(self) -> int | None:
        """The student's number of token ids, where the teacher has more."""
        own, theirs = (
            Limits.of(self.lab.groups[role].spec.name).vocabulary  # type: ignore[arg-type]
            for role in ("actor", self.teacher)
        )
        return own if own is not None and theirs is not None and own < theirs else None
