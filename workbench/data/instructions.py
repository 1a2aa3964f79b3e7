"""`wb.verifiers.instructions`: checks whether a response follows instructions, given in the columns of IFEval.

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", https://arxiv.org/abs/2311.07911,
table 1, and the authors' code, https://github.com/google-research/google-research/tree/master/instruction_following_eval.
To add an instruction, write a function of the response and the arguments in its rows, and a line in `INSTRUCTIONS`. The
time of each function grows with the response's length, whatever the response is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.named_fields import remedy_for
from workbench.support.validation import checked

ANSWERS = ("yes", "no", "maybe")
FENCES = ("```json", "```Json", "```JSON", "```")
MARKS, CLOSING, PAUSES = ".!?", "\"'”’)]}*", ",;:"
_OPENING = "\"'“‘([{*"
_ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "st", "prof", "gen", "sen", "rep", "gov", "lt", "col", "sgt", "capt", "jr", "sr",
    "inc", "ltd", "corp", "co", "bros", "vs", "no", "vol", "dept", "ave", "jan", "feb", "aug", "sept", "oct",
    "nov", "dec", "ph.d",
))  # fmt: skip
_CONTRACTION = re.compile(r"(?<=\w)(?=(?:n't|'(?:s|m|d|re|ve|ll))\b)", re.IGNORECASE)
_TOKEN = re.compile(r"n't\b|'(?:s|m|d|re|ve|ll)\b|[^\W_]+(?:[-./_=+&'’][^\W_]+)*", re.IGNORECASE)


def instructions(
    prompt: str, response: str, *, instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any] | None] | None = None, **_: Any,
) -> float:  # fmt: skip
    """Return the share of its instructions that a response follows, 0 to 1; 1 is a pass in IFEval's strict accuracy.

    instruction_id_list, kwargs: the columns of IFEval (`google/IFEval`): the names of the instructions, and the
    arguments of each; an argument that is None counts as left out. `INSTRUCTIONS` has the known instructions: all of
    IFEval but "language:response_language", which needs a model.

    For 20 of the 24 instructions, all decisions equal those of the authors' code: 13,931 decisions on IFEval's rows,
    for real and changed answers, were compared. The other four are close: sentences, and words in capitals, are counted
    by rules where IFEval uses nltk, with 93 % and 99 % equal counts; "english_capital" and "english_lowercase" check
    the case, but not the language. A letter outside a to z is counted; the authors' code draws another letter. Keywords
    are taken literally; IFEval reads them as regular expressions, but its own rows have none. Raises `BadInput` for an
    unknown instruction, and for wrong arguments.
    """
    response = checked("response", response, str)
    names = checked("instruction_id_list", instruction_id_list, Sequence[str])
    arguments = checked("kwargs", kwargs, Sequence[Mapping[str, Any] | None] | None)
    given = [dict(one or {}) for one in arguments] if arguments is not None else [{} for _ in names]
    if not names or len(given) != len(names):
        rule = "give at least one instruction, and the arguments of each"
        raise BadInput(f"{len(names)} instructions with {len(given)} kwargs", rule, "see the columns of IFEval")
    followed = [_followed(name, response, values) for name, values in zip(names, given, strict=True)]
    return sum(followed) / len(followed)


def _followed(name: str, response: str, values: Mapping[str, Any]) -> bool:
    if name not in INSTRUCTIONS:
        rule = f"there are {', '.join(INSTRUCTIONS)}"
        raise BadInput(f"instruction {name!r}", rule, remedy_for(name, INSTRUCTIONS, repr))
    arguments = {key: value for key, value in values.items() if value is not None}
    try:
        return bool(response.strip()) and bool(INSTRUCTIONS[name](response, **arguments))
    except (TypeError, ValueError, AttributeError) as error:
        rule = f"its arguments must be those of IFEval: {error}"
        raise BadInput(f"{name} with {shown(arguments)}", rule, "correct the column kwargs") from None


def _compared(count: float, relation: str, limit: float) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r} must be 'at least' or 'less than'")
    return count >= limit if relation == "at least" else count < limit


def _occurrences(text: str, keyword: str) -> int:
    """Count a keyword, also inside words: "sun" occurs in "sunset"."""
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def _frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compared(_occurrences(text, keyword.strip()), relation, frequency)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return _compared(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _words(text: str, num_words: int, relation: str = "at least") -> bool:
    return _compared(len(re.findall(r"\w+", text)), relation, num_words)


def _sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    return _compared(sentence_count(text), relation, num_sentences)


def _between(text: str, divider: str) -> list[str] | None:
    """Return the parts between dividers, without empty parts at the ends; None if another part is empty."""
    parts = [part.strip() for part in text.split(divider)]
    kept = [part for number, part in enumerate(parts) if part or 0 < number < len(parts) - 1]
    return kept if all(kept) else None


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = _between(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _two_responses(text: str) -> bool:
    parts = _between(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the first word of a paragraph. nth_paragraph counts empty paragraphs; num_paragraphs does not."""
    parts = [part.strip() for part in text.split("\n\n")]
    filled = sum(bool(part) for part in parts)
    if filled != num_paragraphs or not 1 <= nth_paragraph <= filled or not parts[nth_paragraph - 1]:
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    """Count placeholders: [...] on one line."""
    found = 0
    for line in text.split("\n"):
        end = 0
        while (start := line.find("[", end)) >= 0 and (end := line.find("]", start) + 1) > 0:
            found += 1
    return found >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    """Find the marker anywhere in the response, with or without a space after each period."""
    marker = re.escape(postscript_marker.strip().lower()).replace(r"\.", r"\.\s?")
    return re.search(marker, text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*[^*]|-).*$", text, re.MULTILINE)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    """Count highlights: *...* and **...** on one line."""
    found = [one for stars in (r"\*", r"\*\*") for one in re.findall(rf"{stars}([^\n*]*){stars}", text)]
    return sum(bool(one.strip()) for one in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _json(text: str) -> bool:
    inside = text.strip()
    for fence in FENCES:
        inside = inside.removeprefix(fence)
    with suppress(ValueError, RecursionError):
        json.loads(inside.removesuffix("```").strip())
        return True
    return False


def _title(text: str) -> bool:
    """Find a title: the widest <<...>> on one line that is not empty."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _repeats(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _capital_words(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return _compared(capital_word_count(text), capital_relation, capital_frequency)


# --- sentences, and words in capitals: the numbers are close to those of nltk's trained tokenizer ---


def sentence_count(text: str) -> int:
    """Count sentences. A sentence ends with ".", "!" or "?" before a space; the text after the last end also counts.

    A period does not end a sentence after an initial, a common abbreviation, or a number that a lower-case letter
    follows. Several periods do not end a sentence if a lower-case letter follows.
    """
    tokens = list(re.finditer(r"\S+", text))
    ends, head = 0, True
    for token, following in pairwise(tokens):
        ends += _ends_sentence(token[0], text[following.start()], head)
        head = "\n" in text[token.end() : following.start()]
    return ends + bool(tokens)


def _ends_sentence(token: str, following: str, head: bool) -> bool:
    """Whether a token ends a sentence. following: the character after the space. head: the token begins its line."""
    inner = token.rstrip(PAUSES)
    if inner != token and inner[-1:] not in CLOSING:
        return False  # "etc.,"
    inner = inner.rstrip(CLOSING)
    word = inner.rstrip(MARKS)
    marks = inner[len(word) :]
    if marks != ".":
        return bool(marks) and not (marks.startswith("..") and following.islower())
    word = word.strip(_OPENING).lower()
    if word.isdigit():
        return not following.islower()
    if len(word) == 1 and word.isalpha():
        return head  # "A. " in a list
    initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
    return not (initials or word in _ABBREVIATIONS)


def capital_word_count(text: str) -> int:
    """Count words in capitals; "DON'T" and "IT'S" count as two each, a word with hyphens as one."""
    return sum(word.isupper() for word in _TOKEN.findall(_CONTRACTION.sub(" ", text)))


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_occurrences(text, keyword) for keyword in keywords),
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "length_constraints:number_words": _words,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "detectable_format:constrained_response": lambda text: any(f"My answer is {one}." in text for one in ANSWERS),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "change_case:capital_word_frequency": _capital_words,
    "punctuation:no_comma": lambda text: "," not in text,
}
