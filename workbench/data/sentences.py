"""Sentences and words in capitals, counted by rules. The numbers are close to those of nltk's trained tokenizer."""

from __future__ import annotations

import re
from itertools import pairwise

MARKS, CLOSING, PAUSES = ".!?", "\"'”’)]}*", ",;:"
_OPENING = "\"'“‘([{*"
_ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "st", "prof", "gen", "sen", "rep", "gov", "lt", "col", "sgt", "capt", "jr", "sr",
    "inc", "ltd", "corp", "co", "bros", "vs", "no", "vol", "dept", "ave", "jan", "feb", "aug", "sept", "oct",
    "nov", "dec", "ph.d",
))  # fmt: skip
_CONTRACTION = re.compile(r"(?<=\w)(?=(?:n't|'(?:s|m|d|re|ve|ll))\b)", re.IGNORECASE)
_TOKEN = re.compile(r"n't\b|'(?:s|m|d|re|ve|ll)\b|[^\W_]+(?:[-./_=+&'’][^\W_]+)*", re.IGNORECASE)


def sentence_count(text: str) -> int:
    """Sentences end with ".", "!" or "?" before a space; what follows the last end is a sentence too.

    A point does not end a sentence behind an initial or a common abbreviation, or behind a number that a small letter
    follows. Several points do not end one where a small letter follows.
    """
    tokens = list(re.finditer(r"\S+", text))
    ends, head = 0, True
    for token, following in pairwise(tokens):
        ends += _ends_sentence(token[0], text[following.start()], head)
        head = "\n" in text[token.end() : following.start()]
    return ends + bool(tokens)


def _ends_sentence(token: str, following: str, head: bool) -> bool:
    """following: the character after the space. head: the token is the first of its line."""
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
        return head  # "A. " of a list
    initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
    return not (initials or word in _ABBREVIATIONS)


def capital_word_count(text: str) -> int:
    """Words in capitals; "DON'T" and "IT'S" are two each, a word with hyphens is one."""
    return sum(word.isupper() for word in _TOKEN.findall(_CONTRACTION.sub(" ", text)))
