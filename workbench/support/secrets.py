"""Keys, tokens and passwords are masked before anything of a notebook or a command line is written to disk."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

MASK = "***"
# What services hand out can be told by its form, wherever it stands.
FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abpsr]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
IN_ADDRESS = re.compile(r"(\w+://[^\s/:@]+:)[^\s/@]+@")  # https://user:password@host
_NAME = r"[\w.-]*(?:(?:api|access|secret|private)[_-]?key|secret|passw(?:or)?d|credential|(?<![a-z])token)"
# NAME = "value", NAME: "value", ["NAME"] = 'value', getenv("NAME", "value")
ASSIGNED = re.compile(
    rf"""(?ix) ( \b{_NAME}\b ["']? \s* \]? \s* (?: [:=,]=? \s* | :\s*\w+\s*=\s* ) [rbfu]{{0,2}} )"""
    r"""("{3}|'{3}|["']) (?!\2) .*? \2"""
)
# %env NAME=value, export NAME=value, --name value, --name=value
GIVEN = re.compile(
    rf"(?i)((?:%env\s+|%set_env\s+|\bexport\s+|\benv\s+){_NAME}(?:\s*=\s*|\s+)|--{_NAME}(?:=|\s+))(?![\"'])\S+"
)


def masked(value: Any) -> Any:
    """A text, or texts in lists, tuples and dicts, with `***` in the place of what looks like a secret.

    By form: keys of the usual services, bearer headers, passwords in addresses. By name: what is assigned to a name
    like token, key, secret or password, in Python, in `%env`, and on a command line. Not masked: secrets of another
    form under a name that tells nothing.
    """
    if isinstance(value, str):
        text = FORMS.sub(MASK, value)
        text = BEARER.sub(rf"\1 {MASK}", text)
        text = IN_ADDRESS.sub(rf"\1{MASK}@", text)
        text = ASSIGNED.sub(rf"\1\2{MASK}\2", text)
        return GIVEN.sub(rf"\1{MASK}", text)
    if isinstance(value, dict):
        return {name: MASK if _is_secret(name, one) else masked(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        given = list(value)
        for before, now in pairwise(given):  # a command line: --api-key VALUE
            if isinstance(before, str) and isinstance(now, str) and GIVEN.fullmatch(f"{before} {now}"):
                given[given.index(now)] = MASK
        return [masked(one) for one in given]
    return value


def _is_secret(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, str) and re.fullmatch(f"(?i){_NAME}", name) is not None
