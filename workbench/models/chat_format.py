"""`ChatFormat`: how prompts become a chat, with system prompt, tools, template arguments and an answer's prefill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from workbench.display.tokens import TEMPLATE, WRITERS, WrittenToken, WrittenTokens
from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text, shown
from workbench.models.chat_template import reads, rendered
from workbench.models.control_tokens import MARK, escape, placed, special_tokens
from workbench.models.tokenizers import behind_turn, differing_ends, is_text, put_before
from workbench.models.turn_messages import schema_of
from workbench.support.validation import Rule, settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Variable = Annotated[str, Field(pattern=r"^[^\W\d]\w*$")]  # an identifier
SYSTEM = Rule("a text, or None for no system prompt", 'write system="Be brief."')
TOOLS = Rule("a list of functions or of JSON schemas", "write tools=[add]")
ARGUMENTS = Rule("variables of the chat template by name", 'write arguments={"enable_thinking": False}')
PREFILL = Rule("the text with which each answer begins", 'write prefill="<think>"')
# variables that the template gets in other ways
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
         "chat_template")  # fmt: skip


@settings()
class ChatFormat:
    """How rows become a chat, for prompts, demonstrations and pairs alike: `prompts={"source": ..., "chat":
    wb.ChatFormat(system="Answer with a number.")}`, `lab.demonstrations(rows, chat=wb.ChatFormat(...))`.

    system: a system message for each conversation without one.
    tools: functions, or JSON schemas, that the chat template shows to the model. To have calls executed, see
    `wb.Tools`. arguments: variables of the chat template, such as {"enable_thinking": False}.
    prefill: the text with which each answer begins. It is part of the prompt: `response` is the text after it, and a
    data set's answers that begin with it lose it.

    Later turns of an environment, and prompts that an environment rewrites, as `wb.Tools` does, have the system prompt,
    but neither `tools`, `arguments` nor `prefill`. Raises `BadInput` for wrong values, and if used for something that
    the chat template does not read and that would have no effect.
    """

    system: Annotated[str, Field(pattern=r"\S"), SYSTEM] | None = None
    tools: Annotated[Sequence[Callable[..., Any] | Mapping[str, Any]], TOOLS] = ()
    arguments: Annotated[Mapping[Variable, Any], ARGUMENTS] = field(default_factory=dict)
    prefill: Annotated[str, PREFILL] = ""

    def __post_init__(self) -> None:
        if not is_text(self.prefill):
            raise BadInput(f"ChatFormat.prefill={shown(self.prefill)}", PREFILL.rule, PREFILL.remedy)
        if taken := [name for name in self.arguments if name in _OURS]:
            rule = f"workbench itself passes {taken[0]!r} to the template"
            raise BadInput(f"ChatFormat.arguments={shown(self.arguments)}", rule, "leave it out")
        object.__setattr__(self, "tools", tuple(schema_of(tool) for tool in self.tools))

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise `BadInput` if the chat template would ignore the system prompt, the tools or an argument."""
        if not tokenizer.chat_template:
            raise BadInput(
                f"chat={shown(self)}", f"the tokenizer of {tokenizer.name_or_path!r} has no chat template",
                "choose an instruction-tuned model, or set chat_template in the model's folder",
            )  # fmt: skip
        for name in [*self.arguments, *(["tools"] if self.tools else [])]:
            if not reads(tokenizer, name):
                tools = name == "tools"
                raise BadInput(
                    "ChatFormat(tools=...)" if tools else f"ChatFormat(arguments={{{name!r}: ...}})",
                    f"the chat template of {tokenizer.name_or_path!r} does not read {name!r}: it would have no effect",
                    "describe the tools in system=, or leave them out" if tools else "correct it, or leave it out",
                )
        if self.system is not None and self.system.strip() not in self.text(tokenizer, "-"):
            raise BadInput(
                f"ChatFormat(system={shown(self.system)})",
                f"the chat template of {tokenizer.name_or_path!r} does not show it",
                "write it into the user's message",
            )  # fmt: skip

    def messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a prompt, with the system prompt first."""
        found = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        has_own = any(message["role"] == "system" for message in found)
        return found if self.system is None or has_own else [{"role": "system", "content": self.system}, *found]

    def text(self, tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, Any]]) -> str:
        """Return the text that the model reads before its response."""
        messages = self.messages(prompt)
        return rendered(tokenizer, messages, tools=self.tools, arguments=self.arguments) + self.prefill  # type: ignore[arg-type]


def with_row_tools(chat: Any, tools: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the `chat=` setting for a row with tools of its own."""
    if not tools or chat is False or not tokenizer.chat_template:
        return chat
    return replace(chat if isinstance(chat, ChatFormat) else ChatFormat(), tools=tools)


Span = tuple[int, int, str]
PLACE = "\u2042"  # a character that no template writes


def written_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, Any]], token_ids: Sequence[int], name: str,
    chat: ChatFormat | None = None,
) -> WrittenTokens:  # fmt: skip
    """Return the tokens of a prompt with their writers. prompt: messages, or a text (`token_ids` shows whether it went
    through the template). If the ids' text is unknown, as for a tokenizer without offsets, the writer is "other"."""
    chat = chat or ChatFormat()
    messages = chat.messages(prompt)
    tries = list[tuple[str, list[Span], list[int]]]()
    for read in (escape(tokenizer, messages), messages) if tokenizer.chat_template else ():
        text = chat.text(tokenizer, read)
        end = len(text.replace(MARK, ""))
        spans = _spans(tokenizer, text.replace(MARK, ""), messages, chat)
        tries.append((text, [*spans, (end - len(chat.prefill), end, "assistant")], []))
    if isinstance(prompt, str):
        read_as = (escape(tokenizer, prompt), prompt)
        begins = (put_before(tokenizer), list[int]())
        tries += [(text, [(0, len(prompt), "user")], before) for text in read_as for before in begins]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for text, spans, before in tries if tokenizer.is_fast else ():
        tokens = [*((number, 0, 0) for number in before), *placed(tokenizer, text)][: len(token_ids)]
        if [number for number, _, _ in tokens] == list(token_ids):
            text = text.replace(MARK, "")
            found = list[WrittenToken]()
            for number, start, end in tokens:
                is_special = number in special
                token = str(tokenizer.convert_ids_to_tokens(number)) if is_special else text[start:end]
                by = next((who for first, last, who in spans if first <= start < last), TEMPLATE)
                found.append(WrittenToken(number, token, TEMPLATE if is_special and start == end else by, is_special))
            return WrittenTokens(tuple(found), name)
    plain = [WrittenToken(n, str(tokenizer.decode([n])), "other", n in special) for n in token_ids]
    return WrittenTokens(tuple(plain), name)


def _spans(
    tokenizer: PreTrainedTokenizerBase, text: str, messages: Sequence[Mapping[str, Any]], chat: ChatFormat
) -> list[Span]:
    """Return where the messages stand in the rendered text. Renders marks in their place, and finds each message
    (perhaps stripped) between the same surroundings. Stops at the first message whose surroundings differ."""
    said = [str(message.get("content") or "") for message in messages]
    marks = [f"{PLACE}{n}{PLACE}" for n in range(len(messages))]
    marked = chat.text(tokenizer, [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
    found, at = list[Span](), 0
    for n, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        before, there, marked = marked.partition(mark)
        behind = marked.partition(marks[n + 1])[0] if n + 1 < len(marks) else marked
        start = at + len(before)
        content = next((c for c in (said[n], said[n].strip()) if text.startswith(c + behind, start)), None)
        if not there or content is None or text[at:start] != before:
            return found
        at = start + len(content)
        found.append((start, at, message["role"] if message["role"] in WRITERS else "other"))
    return found


def template_warnings(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = (), text: str = "", unread: Collection[str] = ()
) -> list[str]:  # fmt: skip
    """Return a warning for each problem of the chat template and the tokenizer, with a remedy. prompt_ids, text: of
    one prompt. unread: parts of rows that the template ignores."""
    ends = differing_ends(tokenizer), _end_warning(tokenizer)
    left = (
        f"the model does not see {', '.join(map(repr, sorted(unread)))} of rows, which the chat template of "
        f"{tokenizer.name_or_path!r} does not read. Set chat_template in the model's folder, or use a model that was "
        "trained with these"
        if unread and tokenizer.chat_template else ""
    )  # fmt: skip
    return [*filter(None, (*ends, _bos_warning(tokenizer, prompt_ids), _round_trip_warning(tokenizer, text), left))]


def _end_warning(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a warning if the template ends a turn with a text at which generation does not stop; else ""."""
    behind = behind_turn(tokenizer).strip()
    if not behind or any(behind.startswith(token) for token in special_tokens(tokenizer)):
        return ""
    return (
        f"the chat template of {tokenizer.name_or_path!r} ends a turn with {behind!r:.40}, not a special token: "
        f"generation does not stop there. Set wb.Sampling(stop=[{behind!r:.40}])"
    )


def _bos_warning(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    if tokenizer.bos_token_id is None or list(prompt_ids[:2]) != [tokenizer.bos_token_id] * 2:
        return ""
    return (
        f"prompts begin with two {tokenizer.bos_token!r} (BOS): the chat template writes it twice, or a message begins "
        "with it. Models are trained with one: pass rendered texts with chat=False, or remove it from "
        "chat_template in the model's folder"
    )


def _round_trip_warning(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a warning if tokenizing and decoding changes a text; else "". Spaces at its ends may be lost."""
    if not text:
        return ""
    back = str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False, verbose=False)))
    if back.strip() == text.strip():
        return ""
    pairs = enumerate(zip(text, back, strict=False))
    at = next((i for i, (one, two) in pairs if one != two), min(len(text), len(back)))
    before, after = (plain_text(one[max(0, at - 10) : at + 20], 40) for one in (text, back))
    return (
        f"the tokenizer of {tokenizer.name_or_path!r} changes texts: {before!r} is decoded as {after!r}, "
        "and reward functions read the decoded text. Set clean_up_tokenization_spaces=false in tokenizer_config.json "
        "if spaces differ, or use a tokenizer that does not change texts"
    )
