"""How prompts become a chat: the system prompt, tools, arguments of the template, and how the answer begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.chat_template import rendered
from workbench.models.tokenizers import is_text
from workbench.models.tool_schemas import schema_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what the template is given in other ways
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
         "chat_template")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How rows become a chat, for prompts, demonstrations and pairs alike: `prompts={"source": ..., "chat":
    wb.ChatFormat(system="Answer with a number.")}`, `lab.demonstrations(rows, chat=wb.ChatFormat(...))`.

    system: a system message before each conversation that has none of its own.
    tools: functions, or JSON schemas, that the chat template shows to the model. To have calls carried out, see
    `wb.Tools`. arguments: variables of the chat template, such as {"enable_thinking": False}.
    prefill: how each answer begins. It is part of the prompt: `response` is what comes behind it, and an answer of a
    data set that begins with it is taken from there on.

    Later turns of an environment, and prompts that an environment writes anew, as `wb.Tools` does, have the system
    prompt, and neither `tools`, `arguments` nor `prefill`. Raises `BadInput` for
    wrong values, and where it is used for what the chat template does not read: that would have no effect.
    """

    system: str | None = None
    tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""

    def __post_init__(self) -> None:
        if self.system is not None and not (is_text(self.system) and self.system.strip()):
            _refuse("system", self.system, "a text, or None for no system prompt", 'system="Be brief."')
        if not is_text(self.prefill):
            _refuse("prefill", self.prefill, "the text with which each answer begins", 'prefill="<think>"')
        listed = isinstance(self.tools, Sequence) and not isinstance(self.tools, str)
        if not listed or not all(callable(tool) or isinstance(tool, Mapping) for tool in self.tools):
            _refuse("tools", self.tools, "a list of functions or of JSON schemas", "tools=[add]")
        named = isinstance(self.arguments, Mapping) and all(isinstance(name, str) for name in self.arguments)
        if not named or not all(name.isidentifier() for name in self.arguments):
            example = 'arguments={"enable_thinking": False}'
            _refuse("arguments", self.arguments, "variables of the chat template by name", example)
        if taken := [name for name in self.arguments if name in _OURS]:
            _refuse(
                "arguments", self.arguments, f"{taken[0]!r} is given to the template in another way", "leave it out"
            )
        object.__setattr__(self, "tools", tuple(schema_of(tool) for tool in self.tools))
        object.__setattr__(self, "arguments", dict(self.arguments))

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise `BadInput` where the chat template would leave something of it out."""
        template = tokenizer.chat_template
        if not template:
            raise BadInput(
                f"chat={shown(self)}", f"the tokenizer of {tokenizer.name_or_path!r} has no chat template",
                "choose an instruction-tuned model, or set chat_template in the model's folder",
            )  # fmt: skip
        text = template if isinstance(template, str) else " ".join(template.values())
        for name in [*self.arguments, *(["tools"] if self.tools else [])]:
            if not re.search(rf"\b{name}\b", text):
                tools = name == "tools"
                raise BadInput(
                    "ChatFormat(tools=...)" if tools else f"ChatFormat(arguments={{{name!r}: ...}})",
                    f"the chat template of {tokenizer.name_or_path!r} does not read {name!r}: it would have no effect",
                    "describe the tools in system=, or leave them out" if tools else "correct it, or leave it out",
                )
        if self.system is not None and self.system.strip() not in self.text(tokenizer, "-"):
            raise BadInput(
                f"ChatFormat(system={shown(self.system)})",
                f"the chat template of {tokenizer.name_or_path!r} leaves it out",
                "write it into the user's message",
            )  # fmt: skip

    def messages(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a prompt, the system prompt before them."""
        found = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        has_own = any(message["role"] == "system" for message in found)
        return found if self.system is None or has_own else [{"role": "system", "content": self.system}, *found]

    def text(self, tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Mapping[str, Any]]) -> str:
        """What the model reads up to where the response begins."""
        messages = self.messages(prompt)
        return rendered(tokenizer, messages, tools=self.tools, arguments=self.arguments) + self.prefill  # type: ignore[arg-type]


def check_chat(chat: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `BadInput` for what is no `chat=` of this tokenizer."""
    if isinstance(chat, ChatFormat):
        chat.check(tokenizer)
    elif chat is not None and not isinstance(chat, bool):
        example = 'write chat=wb.ChatFormat(system="Be brief.")'
        raise BadInput(f"chat={shown(chat)}", "must be a wb.ChatFormat(...), True, False or None", example)


def _refuse(name: str, value: Any, rule: str, remedy: str) -> NoReturn:
    raise BadInput(f"ChatFormat.{name}={shown(value)}", rule, f"write {remedy}" if "=" in remedy else remedy)
