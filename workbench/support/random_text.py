"""Whether a text looks like a key that a service has drawn: long, without spaces, and not made of words and numbers."""

from __future__ import annotations

import re

SHORTEST = 16  # characters
# What keys are made of: letters, digits, and the other characters of base64, of addresses and of UUIDs.
RANDOM = r"[\w.~+/=-]{16,}"
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PIECE = re.compile(r"[A-Za-z0-9]+")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_LONGEST_WORD = 24


def looks_random(text: str) -> bool:
    """Whether at least half of a text, and 16 characters, are in pieces that are no words.

    A piece is what stands between two other characters than letters and digits. Words: `reward`, `tokenLevelRewards`,
    `v2`, `p95`, `20261124`, `8B`, `Qwen3ForCausalLM`. No words: letters and digits in turn, a change between upper and
    lower case every other letter, and a run of more than 24 letters. A UUID looks random too.
    """
    if len(text) < SHORTEST or not text.isascii() or re.fullmatch(RANDOM, text) is None:
        return False
    if _UUID.fullmatch(text):
        return True
    odd = sum(len(piece) for piece in _PIECE.findall(text) if not _is_word(piece))
    return odd >= max(SHORTEST, len(text) / 2)


def _is_word(piece: str) -> bool:
    if re.fullmatch(r"\d+[A-Za-z]{0,2}|[a-z]{1,24}\d{0,3}|[A-Z]{1,24}\d{0,3}", piece):
        return True
    if piece.islower() or piece.isupper():
        return False
    words = _WORDS.findall(piece)
    letters_a_word = 3.5 if piece.isalpha() else 3.0
    return len(piece) / len(words) >= letters_a_word and max(map(len, words)) <= _LONGEST_WORD
