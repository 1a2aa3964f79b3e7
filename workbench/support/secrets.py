"""Keys, tokens and passwords are masked in the cells, command lines and options that the workbench records.

Python is parsed (`secret_literals`); shell lines, comments, texts inside strings, and cells that do not parse are
searched by patterns. Every pattern has a bounded prefix, so that the time grows linearly with the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from workbench.support.random_text import RANDOM, looks_random
from workbench.support.secret_literals import (
    MASK,
    PERHAPS_NAME,
    SECRET_NAME,
    STRING,
    is_secret,
    is_secret_name,
    may_name_secret,
    parts_of,
    with_masked_body,
)

# Keys that services issue have a known prefix: they are masked in any place.
FORMS = re.compile(
    r"(?:\b|(?<=\\[nrt]))(?:hf_[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}"
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|pypi-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abpsr]-[\w-]{10,}|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
    r"|(?<=PRIVATE KEY-----)[^-]+(?=-----END)"
)
BEARER = re.compile(r"\b(Bearer\s{1,8}|Basic\s{1,8}(?=[A-Za-z._~+/-]{0,200}[\d=]))[A-Za-z0-9._~+/=-]{8,}")
# https://user:password@host, and https://token@host; a variable in the place of the password stays.
VARIABLE = r"(?!\$\{?\w{1,64}\}?@|\{[^{}\n]{1,200}\}@)"
IN_ADDRESS = re.compile(rf"(?<=://)([^\s/:@\"']{{0,256}}:){VARIABLE}[^\s/\"']{{1,512}}@")
USER_OF_ADDRESS = re.compile(rf"(https?://){VARIABLE}[^\s/:@\"']{{1,512}}@")
# In shell lines, comments and the texts of strings: NAME = "value", NAME: "value", ["NAME"] = "value",
# NAME = getenv("X") or "value". The second group holds the strings to mask.
ASSIGNED = re.compile(
    rf"""({SECRET_NAME}(?:\\?["'])?\s{{0,8}}\]?\s{{0,8}}(?::[^\n="'(){{}},]{{1,80}})?(?:=(?!=)|:)\s{{0,8}})"""
    rf"""((?:{STRING}|[^\n"',;#{{}}])+)"""
)
OPTION = rf"(?<![\w-])--[\w.-]{{0,64}}?{SECRET_NAME}"
QUOTED_OPTION = re.compile(rf"({OPTION}(?:=|\s{{1,8}}))({STRING})")
VALUE = r"(?!\$[\w{(]|<|%[sdr(]|[{(\[=])(?:[^\s\"'&;|\\]|\\[^\s\"'nrt])+"  # no variable, nor a place to fill in
# --name value, --name=value, NAME=value, Authorization: value, X-Api-Key: value
GIVEN = re.compile(
    rf"({OPTION}(?:=|\s{{1,8}})|{SECRET_NAME}=|"
    rf"(?i:\bauthorization|\bx-[\w-]{{0,64}}?(?:key|token)):\s{{0,8}}(?:(?i:bearer|basic|token)\s{{1,8}})?)"
    rf"(?!(?i:bearer|basic|token)\s){VALUE}"
)
SET_ENV = re.compile(
    rf"(%(?:set_)?env[ \t]{{1,8}}[\w.-]{{0,64}}?{SECRET_NAME}[ \t]{{0,8}}[= \t][ \t]{{0,8}})[^\s$][^\n]*"
)
# wandb login VALUE, docker login -p VALUE
LOGIN = re.compile(r"(\blogin\s[^\n]{0,100}?(?:\s-p\s{1,8}|(?<=\s)(?=[\w-]{32})))[^\s\"'\\]+")
# NAME: value and NAME = value, a line each, in the file or script that a cell magic takes
ENTRY = re.compile(rf"(?m)^([^\n:=]{{0,64}}?{SECRET_NAME}[ \t]{{0,8}}[:=][ \t]{{0,8}})(?![\s\"'$])[^\n]+")
# Of a name that may hold a secret: key = "value", "key": "value", --key value, KEY=value, key: value
PERHAPS = re.compile(
    rf"""({PERHAPS_NAME}(?:\\?["'])?(?:\s{{0,8}}\]?\s{{0,8}}[=:]\s{{0,8}}|[ \t]{{1,8}})(?:\\?["'])?)({RANDOM})"""
)
CELL_OF_PYTHON = re.compile(r"\s*%%(?:time|timeit|capture|prun)\b")
LITERAL = re.compile(r"(?s)([rbfuRBFU]*)(\"{3}|'{3}|[\"'])(.*)\2")
BRACES = re.compile(r"((?<!\{)\{[^{}]+\}(?!\}))")
HINT = re.compile(r"(?i)token|key|secret|passw|passphrase|credential|authorization|login|[_-]pass|\bpw")


def masked(value: Any) -> Any:
    """A copy in which `***` replaces secrets. value: a text (such as a cell), or lists, tuples and dicts of texts.

    Three rules find a secret. Its form: keys of the usual services, bearer headers, passwords in addresses. Its name:
    strings that are given to a name like token, key, secret or password, in Python, by `%env`, in shell lines and on
    command lines; of names like key, keys and tokens, which often hold none, only strings that `looks_random` takes for
    one. Its use: what `login(...)` gets. Names of special tokens (`pad_token`, `eos_token`) are no secrets.
    Not found: a secret of an unknown form under a name that does not say so.
    """
    if isinstance(value, str):
        return without_forms(_without_named(value))
    if isinstance(value, dict):
        return {name: _given_to(name, one) for name, one in value.items()}
    if isinstance(value, list | tuple):  # perhaps a command line: --api-key VALUE
        befores = [None, *value][:-1]
        return [_word(before, one) for before, one in zip(befores, value, strict=True)]
    return value


def secrets_in(text: str) -> Iterator[tuple[int, str]]:
    """What `masked` hides in a text: the line where it begins, from 1, and the secret itself."""
    first, *pieces = str(masked(text)).split(MASK)
    at = len(first)
    for piece in pieces:
        end = text.find(piece, at + 1) if piece else len(text)
        if end < 0:
            return
        if text[at:end] != MASK:
            yield text.count("\n", 0, at) + 1, text[at:end]
        at = end + len(piece)


def _word(before: object, word: Any) -> Any:
    if not isinstance(word, str):
        return masked(word)
    option = before if isinstance(before, str) and before.startswith("--") and not word.startswith("--") else ""
    if re.fullmatch(OPTION, option) or (may_name_secret(option) and looks_random(word)):
        return MASK
    return without_forms(_in_text(word))


def _given_to(name: object, value: Any) -> Any:
    """The value of a name without the secrets in it."""
    if isinstance(name, str) and (is_secret_name(name) or may_name_secret(name)):
        value = _hidden(name, value)
    return value if isinstance(name, str) and is_secret_name(name) else masked(value)


def _hidden(name: str, value: Any) -> Any:
    """A value in which those texts are masked that are secrets under this name."""
    if isinstance(value, str):
        return MASK if value and is_secret(name, value) else value
    if isinstance(value, dict):
        return {key: _hidden(name, one) for key, one in value.items()}
    return [_hidden(name, one) for one in value] if isinstance(value, list | tuple) else value


def without_forms(text: str) -> str:
    """A text without keys of known forms, bearer headers and passwords in addresses, whatever it is a text of."""
    text = BEARER.sub(rf"\1{MASK}", FORMS.sub(MASK, text))
    return USER_OF_ADDRESS.sub(rf"\1{MASK}@", IN_ADDRESS.sub(rf"\1{MASK}@", text))


def _without_named(text: str) -> str:
    """The text of a cell without the values of secret names."""
    if not HINT.search(text):
        return text
    if text.lstrip().startswith("%%") and not CELL_OF_PYTHON.match(text):
        return ENTRY.sub(rf"\1{MASK}", _in_text(text))
    parts = parts_of(text)
    if parts is None:  # not Python
        return _in_text(text)
    pieces, done = [], 0
    for part in parts:
        source = text[part.start : part.end]
        pieces.append(text[done : part.start])
        if part.kind == "secret":
            pieces.append(with_masked_body(source))
        elif part.kind == "string":
            pieces.append(_in_literal(source))
        else:
            pieces.append(_in_text(source))
        done = part.end
    return "".join([*pieces, text[done:]])


def _in_text(text: str) -> str:
    """By patterns alone."""
    for pattern in (SET_ENV, LOGIN, GIVEN):
        text = pattern.sub(rf"\1{MASK}", text)
    text = PERHAPS.sub(lambda found: found[1] + MASK if looks_random(found[2]) else found[0], text)
    for pattern in (ASSIGNED, QUOTED_OPTION):
        text = pattern.sub(
            lambda found: found[1] + re.sub(STRING, lambda one: with_masked_body(one[0]), found[2]), text
        )
    return text


def _in_literal(source: str) -> str:
    """In the text of a string; in an f-string the Python in braces stays."""
    found = LITERAL.fullmatch(source)
    if found is None:
        return source
    prefix, quotes, body = found.groups()
    pieces = BRACES.split(body) if "f" in prefix.lower() else [body]
    shown = "".join(piece if place % 2 else _in_text(piece) for place, piece in enumerate(pieces))
    return f"{prefix}{quotes}{shown}{quotes}"
