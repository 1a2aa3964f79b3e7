"""Records the requests of one sample as tokens: sampled tokens are recorded as sampled, never tokenized again.

A request that continues an earlier one (its messages begin with those of the earlier request and the answer to it) goes
on in the same segment: the harness's new text is added, outside the mask. Any other request begins a segment of its
own: a context of the same row, such as that of a sub-agent, of a second attempt, or of a summarized history. A request
that continues an earlier point of a segment begins with the tokens of that segment up to that point.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from workbench.engines.generation import Ending, Response
from workbench.errors import BadInput
from workbench.errors.plain_text import said as words
from workbench.errors.plain_text import shown
from workbench.models.control_tokens import encoded, escape
from workbench.models.tokenizers import render_prompt, render_reply
from workbench.models.turn_messages import TurnReader, with_tools
from workbench.settings.engines import Sampling
from workbench.support.seeds import derive_seed, turn_seed
from workbench.workers.agents.requests import Kind, Refused, Request
from workbench.workers.conversation import Conversation, ConversationEnding

MOST_PENDING = 16  # requests of a sample that wait for an answer at the same time
MOST_OF_ENDPOINT = 1024  # of an endpoint, whose clients are many
MOST_REFUSED = 200  # a harness that goes on after so many errors will not stop


@dataclass(frozen=True)
class _TurnEnd:
    """The end of a turn. messages, tokens: how many messages, and tokens of the segment's response, precede it.
    written: the tokens seen by a harness that continues the text, without EOS; text: the same, of a completion. last:
    the turn's last token."""

    messages: int
    tokens: int
    written: int
    text: str
    last: int


@dataclass(kw_only=True)
class Segment:
    """One growing context. history: its tokens as a conversation. messages: of a chat, with answers. tools: shown to
    the model. pending: whether a request waits for its turn. draw: its number among segments of the same prompt."""

    kind: Kind
    history: Conversation
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()
    turn_ends: list[_TurnEnd] = field(default_factory=list)
    pending: bool = False
    draw: int = 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as the engine gets it. new: the tokens that the harness wrote since the segment's last turn."""

    prompt_ids: list[int]
    new: list[int]
    seed: int
    room: int
    stop: tuple[str, ...]
    segment: Segment
    request: Request


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response sampled for a request. text: without special tokens, and without the stop that ended it. tool_calls:
    in OpenAI's format; `text` is then the text beside them."""

    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    ending: Ending
    prompt_tokens: int
    tokens: int


class Recording:
    """The recorded requests and answers of one sample.

    prompt_ids: the row's; a first request with this prompt is drawn with the sample's own seed, like a plain response.
    max_model_tokens: of prompt and response together. keeps: False for an endpoint: each request is a separate prompt
    with separate draws, and only the newest answer is kept, so that there may be any number of requests.
    """

    def __init__(
        self, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], seed: int,
        max_model_tokens: int, keeps: bool = True,
    ) -> None:  # fmt: skip
        self._sampling, self._tokenizer, self._max_model_tokens = sampling, tokenizer, max_model_tokens
        self._keeps, self._draws = keeps, count()
        self.prompt_ids, self.seed = list(prompt_ids), seed
        self.begin_again()

    def begin_again(self) -> None:
        """Forget all turns; the same requests then get the same answers."""
        self.segments: list[Segment] = []
        self.turns, self.pending, self.refused = 0, 0, 0
        self.ending: ConversationEnding = "done"  # or the limit by which a request was refused

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> Asked:
        """Accept a request. Raises `Refused`."""
        try:
            return self._ask(request)
        except Exception as problem:  # a harness's mistake fails only its own request
            self.refused += 1
            if isinstance(problem, Refused):
                raise
            param = "messages" if request.kind == "chat" else "prompt"
            if isinstance(problem, BadInput):
                raise Refused(str(problem), param=param) from problem
            raise Refused(
                f"{type(problem).__name__}: {words(problem)}", "the request could not be tokenized",
                "check its messages and tools", param=param,
            ) from problem  # fmt: skip

    @property
    def flooded(self) -> bool:
        """Whether the harness continues although its requests are refused, or does not wait for their answers."""
        return self._keeps and self.refused > MOST_REFUSED

    def _ask(self, request: Request) -> Asked:
        most = MOST_PENDING if self._keeps else MOST_OF_ENDPOINT
        if self.pending >= most:
            raise Refused(
                f"{self.pending} requests of this sample wait", f"at most {most} may wait at the same time",
                "wait for an answer before you ask again", status=429, code="rate_limit_exceeded",
            )  # fmt: skip
        if self._keeps and self.turns + self.pending >= self._sampling.max_turns:
            self.ending = "max_turns"
            raise Refused(
                f"request {self.turns + self.pending + 1} of this sample", f"max_turns={self._sampling.max_turns}",
                "return from the function, or call generate_sequences(agent=..., max_turns=...)", code="max_turns",
            )  # fmt: skip
        segment, new = self._chat(request) if request.kind == "chat" else self._text(request)
        room = self._room(segment, len(new), request.most_tokens)
        if not segment.turn_ends:
            self._begin(segment)
        segment.pending, self.pending = True, self.pending + 1
        history = segment.history
        return Asked(
            prompt_ids=history.prompt_ids + history.response_ids + new,
            new=new,
            seed=turn_seed(history.seed, len(segment.turn_ends)),
            room=room,
            stop=self._sampling.stop if request.stop is None else request.stop,
            segment=segment,
            request=request,
        )

    def _begin(self, segment: Segment) -> None:
        """Give a new segment its seed: its draws depend on its prompt, not on when it is requested."""
        prompt = segment.history.prompt_ids
        if not self._keeps:
            segment.history.seed = derive_seed(self.seed, repr(tuple(prompt)), next(self._draws))
            return
        taken = {other.draw for other in self.segments if other.history.prompt_ids == prompt}
        segment.draw = next(draw for draw in count() if draw not in taken)
        own = prompt == self.prompt_ids and not segment.draw
        segment.history.seed = self.seed if own else derive_seed(self.seed, repr(tuple(prompt)), segment.draw)
        self.segments.append(segment)

    def _room(self, segment: Segment, new: int, wanted: int | None) -> int:
        """Return the most tokens that an answer may have. Raises `Refused` if there is no room."""
        history = segment.history
        used = len(history.response_ids) + new
        left = self._max_model_tokens - len(history.prompt_ids) - used
        room = min(left, self._sampling.max_new_tokens - used)
        if room < 1:
            self.ending = "max_tokens"
            which = "Generation.max_model_tokens" if left < 1 else "max_new_tokens"
            raise Refused(
                f"{len(history.prompt_ids)} tokens of the prompt and {used} after it",
                f"the model reads {self._max_model_tokens} tokens; max_new_tokens={self._sampling.max_new_tokens} "
                "limits the tokens after the first prompt of a conversation",
                f"shorten the messages, or raise {which}", param="messages", code="context_length_exceeded",
            )  # fmt: skip
        return room if wanted is None else min(room, wanted)

    # --- which segment it continues -----------------------------------------------------------------------------------

    def _chat(self, request: Request) -> tuple[Segment, list[int]]:
        """Return the segment that a request continues, or a new one, and the tokens that the harness wrote since."""
        messages = list(request.messages)
        found = self._continued(messages, request.tools) if self._keeps else None
        if found is None:
            return _begun(request, self._prompt(request)), []
        segment, point = found
        new = render_reply(self._tokenizer, escape(self._tokenizer, messages[point.messages :]), after=point.last)
        if point is segment.turn_ends[-1] and not segment.pending:
            return segment, new
        return _begun(request, segment.history.prompt_ids + segment.history.response_ids[: point.tokens] + new), []

    def _prompt(self, request: Request) -> list[int]:
        messages, tools = escape(self._tokenizer, (request.messages, request.tools))
        if not tools:
            return render_prompt(self._tokenizer, messages)
        return encoded(self._tokenizer, with_tools(self._tokenizer, messages, tools, None))

    def _continued(
        self, messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...]
    ) -> tuple[Segment, _TurnEnd] | None:
        """Return the latest turn that messages continue, if the model was shown the same tools."""
        best: tuple[Segment, _TurnEnd] | None = None
        for segment in (one for one in self.segments if one.kind == "chat" and one.tools == tools):
            for point in segment.turn_ends:
                longer = best is None or point.messages > best[1].messages
                if longer and point.messages < len(messages):
                    if segment.messages[: point.messages] != messages[: point.messages]:
                        break
                    best = segment, point
        return best

    def _text(self, request: Request) -> tuple[Segment, list[int]]:
        best: tuple[int, Segment, _TurnEnd] | None = None
        for segment in (one for one in self.segments if one.kind == "text" and self._keeps):
            for point in segment.turn_ends:
                known = self._before(segment, point, request.prompt)
                if known and (best is None or known > best[0]):
                    best = known, segment, point
        if best is None:
            return _begun(request, self._encoded(request.prompt, begins=True)), []
        known, segment, point = best
        new = self._encoded(request.prompt[known:])
        if point is segment.turn_ends[-1] and not segment.pending and point.written == point.tokens:
            return segment, new
        return _begun(request, segment.history.prompt_ids + segment.history.response_ids[: point.written] + new), []

    def _before(self, segment: Segment, point: _TurnEnd, prompt: str | tuple[int, ...]) -> int:
        """Return how much of a prompt, in characters or tokens, is a segment up to a turn; 0 if the prompt differs, or
        adds nothing to it."""
        before: str | tuple[int, ...] = point.text
        if isinstance(prompt, tuple):
            before = tuple(segment.history.prompt_ids + segment.history.response_ids[: point.written])
        return len(before) if prompt[: len(before)] == before and len(prompt) > len(before) else 0

    def _encoded(self, prompt: str | tuple[int, ...], *, begins: bool = False) -> list[int]:
        if isinstance(prompt, tuple):
            wrong = next((token for token in prompt if not 0 <= token < len(self._tokenizer)), None)
            if wrong is not None:
                raise Refused(
                    f"token {shown(wrong)} of the prompt", f"token ids are 0 to {len(self._tokenizer) - 1}",
                    "encode the prompt with the policy's tokenizer", param="prompt",
                )  # fmt: skip
            return list(prompt)
        if begins:
            return render_prompt(self._tokenizer, prompt, chat=False)
        return list(self._tokenizer.encode(prompt, add_special_tokens=False))

    # --- answers ------------------------------------------------------------------------------------------------------

    def answered(self, asked: Asked, response: Response) -> Answer:
        """Record the response sampled for a request, and return the answer."""
        segment, history, request = asked.segment, asked.segment.history, asked.request
        self._waits_no_more(segment)
        self.turns += 1
        self.segments = self.segments if self._keeps else [segment]
        history.add_observation(asked.new)
        history.add_turn(response.ids, response.log_probs, response.sets)
        text, calls = self._seen(response, asked.stop), list[dict[str, Any]]()
        if request.tools:
            message = TurnReader(self._tokenizer, None, request.tools).message(response.ids)
            # harnesses identify calls by their ids, also calls of earlier turns
            before = sum(len(one.get("tool_calls", ())) for one in request.messages)
            calls = [{**one, "id": f"call{before + n:05d}"} for n, one in enumerate(message.get("tool_calls", ()))]
            text = message["content"] if calls else text
        if request.kind == "chat":
            answered = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
            segment.messages = [*request.messages, answered]
        at_eos, written = response.ending == "eos", ""
        if isinstance(request.prompt, str):
            written = request.prompt + str(self._tokenizer.decode(response.ids[: len(response.ids) - at_eos]))
        tokens = len(history.response_ids)
        segment.turn_ends.append(_TurnEnd(len(segment.messages), tokens, tokens - at_eos, written, response.ids[-1]))
        return Answer(
            text=text,
            tool_calls=_as_openai(calls),
            ending=response.ending,
            prompt_tokens=len(asked.prompt_ids),
            tokens=len(response.ids),
        )

    def dropped(self, asked: Asked) -> None:
        """Drop a request whose client stopped waiting: it is not in the row, and a repetition gets the same answer."""
        self._waits_no_more(asked.segment)
        self.refused += 1
        if not asked.segment.turn_ends:
            self.segments = [segment for segment in self.segments if segment is not asked.segment]

    def _waits_no_more(self, segment: Segment) -> None:
        segment.pending, self.pending = False, self.pending - 1

    def _seen(self, response: Response, stop: Sequence[str]) -> str:
        """Return the text of an answer, up to the stop that ended it."""
        text = str(self._tokenizer.decode(response.ids, skip_special_tokens=True))
        if response.ending != "stop":
            return text
        ends = [found for found in (text.find(one) for one in stop) if found >= 0]
        return text[: min(ends)] if ends else text

    # --- the row ------------------------------------------------------------------------------------------------------

    def row(self) -> Conversation:
        """Return the sample as one row: contexts follow each other in the order of their requests; the prompts of all
        but the first are in the response, outside the mask."""
        first, *others = [segment.history for segment in self.segments if segment.turn_ends] or [
            Conversation(prompt_ids=self.prompt_ids, seed=self.seed)
        ]
        for history in others:
            first.begin_context(history.prompt_ids, len(history.prompt_ids))
            _add(first, history)
        return first


def _begun(request: Request, prompt_ids: list[int]) -> Segment:
    """Return a new segment. It gets its seed when its request is accepted."""
    history = Conversation(prompt_ids=prompt_ids, seed=0)
    return Segment(kind=request.kind, history=history, messages=list(request.messages), tools=request.tools)


def _as_openai(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]


def _add(whole: Conversation, part: Conversation) -> None:
    """Append the turns of one conversation to another."""
    start = 0
    for mine, run in groupby(part.mask):
        stop = start + len(list(run))
        if mine:
            whole.add_turn(part.response_ids[start:stop], part.log_probs[start:stop], part.sets[start:stop])
        else:
            whole.add_observation(part.response_ids[start:stop])
        start = stop
