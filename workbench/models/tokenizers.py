"""Loads tokenizers, and turns prompts, answers and replies into token ids or texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.chat_template import rendered, template_text
from workbench.models.control_tokens import encoded, special_tokens, unmarked
from workbench.models.resolve import quiet_transformers, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workbench.models.chat_format import ChatFormat

# Names of padding tokens in model families, then names of tokens that no conversation contains.
_FILLERS = (
    "<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>", "<|fim_pad|>", "<|endoftext|>", "<unk>",
)  # fmt: skip


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with a padding token that differs from the end-of-sequence token.

    Many checkpoints pad with the end-of-sequence token; then a mask that is derived from the ids hides the end of every
    response. Our masks never come from ids, but a user's code may derive one. If the checkpoint's padding token is
    missing or equal to EOS, another existing special token is used; no token is added, because that would change the
    size of the embeddings. Raises `BadInput` if no token fits or no tokenizer loads, `ModelUnavailable` if there is no
    such model.
    """
    from transformers import AutoTokenizer

    folder = resolve(name)
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # of any class, depending on the family, whose configuration is read as well
            raise BadInput(
                f"no tokenizer loads from {str(folder)!r} ({type(error).__name__})",
                "a model folder must also have its tokenizer",
                "write it with tokenizer.save_pretrained(folder)",
            ) from error
    if tokenizer.eos_token_id is None:
        raise BadInput(
            f"the tokenizer of {str(name)!r} has no end-of-sequence token",
            "generation needs one to end a response",
            "set eos_token in the folder's tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _filler(tokenizer, str(name))
    return tokenizer


def _filler(tokenizer: Any, name: str) -> str:
    """Return a special token that the chat template does not write and that neither begins nor ends a sequence."""
    special, template = special_tokens(tokenizer), template_text(tokenizer)
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    free = [token for token in special if token not in taken and token not in template]
    for token in (*_FILLERS, tokenizer.unk_token, *free):
        if token in free:
            return str(token)
    raise BadInput(
        f"the tokenizer of {name!r} has no token for padding (EOS {tokenizer.eos_token!r}, special {sorted(special)})",
        "the padding token must exist already and differ from EOS",
        "set pad_token in the folder's tokenizer_config.json to a token that texts never contain",
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[dict[str, Any]], *, chat: bool | ChatFormat | None = None
) -> list[int]:
    """Return the token ids of a prompt, up to the beginning of the response.

    prompt: a text, or messages such as [{"role": "user", "content": "Hi"}], which need a chat template.
    chat: whether the chat template renders a text as a user's message; None: if the tokenizer has a template. A
    `ChatFormat` has more settings. Control tokens in a text act as such, unless `escape` has marked them.
    """
    is_text = isinstance(prompt, str)
    if not prompt:
        raise BadInput(f"prompt={prompt!r}", "a prompt must not be empty", "drop the row")
    if not is_text and chat is False:
        raise BadInput(
            "messages with chat=False", "messages are rendered by the chat template", "pass a text, or leave out chat="
        )
    if chat is None:
        chat = not is_text or bool(tokenizer.chat_template)
    if not chat:
        return beginning(tokenizer, str(prompt))
    if not tokenizer.chat_template:
        raise BadInput(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template",
            "messages and chat=True need one",
            "pass texts with chat=False, choose an instruction-tuned model, or set tokenizer.chat_template",
        )
    messages: Sequence[Any] = [{"role": "user", "content": prompt}] if is_text else prompt
    text = rendered(tokenizer, messages) if isinstance(chat, bool) else chat.text(tokenizer, prompt)
    return encoded(tokenizer, text)  # the template writes all special tokens


def beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text at the beginning of a sequence: with one BOS (or whatever the tokenizer puts
    before a text), even if the text begins with it, and without EOS, because a response follows."""
    own, before = encoded(tokenizer, text), put_before(tokenizer)
    return own if own[: len(before)] == before else before + own


def put_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that the tokenizer puts before a text, such as BOS."""
    own, whole = (list(tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (False, True))
    return whole[: next((i for i in range(len(whole)) if whole[i : i + len(own)] == own), 0)]


def is_text(value: object) -> bool:
    """Whether a value is a text that a tokenizer accepts: without lone surrogates, which are no characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_texts(value: object) -> bool:
    """Whether `is_text` accepts all texts in a value of lists and mappings, including the keys."""
    left, seen = [value], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, str):
            if not is_text(one):
                return False
        elif isinstance(one, (list, tuple, dict)) and id(one) not in seen:  # a value may contain itself
            seen.add(id(one))
            left += [*one, *one.values()] if isinstance(one, dict) else one
    return True


TURN = "\u2042turn\u2042"  # a placeholder for a turn of the assistant in a rendered conversation
QUESTION = {"role": "user", "content": "-"}
THINK = "<think>"
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys that data and templates use for the reasoning


class AnswerFormat:
    """Renders an assistant's message as the chat template writes it after the head of a turn: the text, tool calls,
    reasoning in a key of its own, and additions of the template, such as an empty `<think>` block. Renders it as the
    last turn, because a model writes it there. arguments: variables of the template. prefill: the beginning of the
    answer that is part of the prompt.

    Follows templates that strip white space, but keeps other parts that they drop from a text, such as reasoning.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None, prefill: str = ""
    ) -> None:
        self._tokenizer, self._arguments, self._prefill = tokenizer, arguments, prefill
        self._head, self._tail = rendered(tokenizer, [QUESTION], arguments=arguments), behind_turn(tokenizer)
        self._adds_nothing = self._written({"role": "assistant", "content": TURN}) == TURN
        begun = (THINK if self._head.rstrip().endswith(THINK) else "") + prefill
        inside = THINK in begun.rpartition("</think>")[2] and not self._adds_nothing
        self._opened = THINK if inside else ""

    def _written(self, message: Mapping[str, Any]) -> str | None:
        """Return the text that the template writes for a message; None if the conversation does not begin like a
        rollout, or ends differently."""
        whole = rendered(self._tokenizer, [QUESTION, message], next_turn=False, arguments=self._arguments)
        end = len(whole) - len(self._tail)
        found = whole.startswith(self._head) and whole.endswith(self._tail) and end >= len(self._head)
        return whole[len(self._head) : end] if found else None

    def __call__(self, message: Mapping[str, Any]) -> str:
        """Return the answer's text. Raises `BadInput` if the template drops a call, or reasoning or text beside a call,
        and for an answer without reasoning if the turn begins inside the reasoning."""
        text, calls = str(message["content"]), message.get("tool_calls") or ()
        reasoning = next((str(message[name]) for name in REASONING if message.get(name)), "")
        said, apart = text.strip(), [call.get("function", call)["name"] for call in calls] + [reasoning.strip()]
        if self._adds_nothing and text == said and not any(apart):
            return text.removeprefix(self._prefill)
        behind = said.removeprefix(self._opened).lstrip() if self._opened else said
        written = self._written({**message, "reasoning_content": reasoning} if reasoning else message)
        lacks = [one for one in (behind, *apart) if one not in (written or "")]
        if written is not None and not lacks and written.startswith(self._prefill):
            return written.removeprefix(self._prefill)
        goes_on = said.startswith(self._opened) or "</think>" in said
        if any(apart) or not goes_on:
            what = "the turn begins inside <think>, but the answer has no reasoning"
            if written is None and goes_on:
                what = "it begins the answer's turn with other text than the end of a prompt"
            elif goes_on:
                what = f"it drops {unmarked(shown((lacks or [self._prefill])[0], 60))}"
            raise BadInput(
                f"the answer {unmarked(shown(dict(message), 120))}",
                f"the chat template of {self._tokenizer.name_or_path!r}: {what}",
                "write all of it into the content, as the model would, or drop the row",
            )
        if self._adds_nothing and said:  # the template drops a part of the text: take only its white space around it
            around = self._written({**message, "content": text.replace(said, TURN, 1)}) or TURN
            behind = around.replace(TURN, said)
        begins = bool(self._prefill) and said.startswith(self._prefill)
        return (said if begins else behind).removeprefix(self._prefill)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends an assistant's turn: the special token that the chat template writes after it, perhaps
    after white space. Return the tokenizer's EOS if there is no such token or no template, or it cannot render a turn.
    """
    assert tokenizer.eos_token_id is not None  # `load_tokenizer` checks this
    eos = int(tokenizer.eos_token_id)
    first = tokenizer.encode(behind_turn(tokenizer).lstrip(), add_special_tokens=False)[:1]
    return first[0] if first and str(tokenizer.convert_ids_to_tokens(first[0])) in special_tokens(tokenizer) else eos


def behind_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the chat template writes after a turn of the assistant; "" without a template, or if it
    cannot render a turn."""
    if not tokenizer.chat_template:
        return ""
    try:
        text = rendered(tokenizer, [QUESTION, {"role": "assistant", "content": TURN}], next_turn=False)
    except BadInput:
        return ""
    return text.rpartition(TURN)[2] if TURN in text else ""


def differing_ends(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a warning if the chat template and the tokenizer have different end tokens; else ""."""
    end = turn_end(tokenizer)
    if end == tokenizer.eos_token_id:
        return ""
    return (
        f"the chat template of {tokenizer.name_or_path!r} ends a turn with {tokenizer.decode([end])!r}, its "
        f"tokenizer's EOS is {tokenizer.eos_token!r}: answers of demonstrations and pairs end with the first if "
        "they go through the template, and rollouts stop at both"
    )


def render_reply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, after: int) -> list[int]:
    """Return the token ids between two assistant turns: the end of the first, `messages`, the head of the second.

    after: the turn's last token; if it is the template's end token, which may differ from the tokenizer's EOS, it is
    not written again. Earlier turns are not rendered again, so sampled tokens do not change. Raises `BadInput` for a
    tokenizer without a chat template, or if the template cannot render these messages.
    """
    if not tokenizer.chat_template:
        raise BadInput(
            f"messages for the tokenizer of {tokenizer.name_or_path!r}",
            "it has no chat template",
            "reply with a text, which is inserted unchanged",
        )
    conversation = [QUESTION, {"role": "assistant", "content": TURN}, *messages]
    text = rendered(tokenizer, conversation)
    _, found, rest = text.partition(TURN)
    if not found:
        raise BadInput("this chat template", "it drops earlier turns of the assistant", "reply with a text instead")
    token_ids = encoded(tokenizer, rest.lstrip())  # some templates write white space before the end of a turn
    return token_ids[1:] if token_ids[:1] == [after] else encoded(tokenizer, rest)
