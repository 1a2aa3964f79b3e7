"""Where the string literals of a cell are, and which of them are the values of names like token, key or password."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from workbench.support.random_text import looks_random

MASK = "***"
# How a name ends that holds a secret; in camel case too. Tokens of a vocabulary, pad_token and the like, hold none.
_SPECIAL = (
    r"(?<!(?i:pad|eos|bos|unk|sep|cls))(?<!(?i:stop|mask))"
    r"(?<!(?i:pad|eos|bos|unk|sep|cls)[_-])(?<!(?i:stop|mask)[_-])"
)
SECRET_NAME = (
    r"(?:(?i:api|access|secret|private|auth|account)[_-]?(?i:keys?)|(?i:secrets?|passw(?:or)?ds?|passphrase)"
    rf"|(?i:credentials?|authorization)|{_SPECIAL}(?:(?<![A-Za-z])(?i:token)|(?<=[a-z])Token)"
    r"|(?i:auth|access|api)(?i:token)|(?<=[_-])(?i:pass)|(?<![A-Za-z])(?i:pw))(?:_?\d{1,3})?(?!\w)"
)
# How a name ends that may hold one: `key` is also a column's name, `tokens` are also those of a vocabulary.
PERHAPS_NAME = r"(?:(?<![A-Za-z])(?i:keys?|tokens)|(?<=[a-z])(?:Keys?|Tokens))(?:_?\d{1,3})?(?!\w)"
# A string in its quotes, which may be escaped ones inside another string; empty ones hold nothing.
STRING = (
    r"(?:[rbfuRBFU]{0,2}(?:\"\"\"(?s:.*?)\"\"\"|'''(?s:.*?)'''"
    r"|\\\"(?:(?!\\\")(?:\\.|[^\\\n]))*\\\"|\\'(?:(?!\\')(?:\\.|[^\\\n]))*\\'"
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'))"
)
_NAME_ENDS, _PERHAPS_ENDS = re.compile(SECRET_NAME + r"\Z"), re.compile(PERHAPS_NAME + r"\Z")
# Lines of IPython: !command, %magic, name = !command, with their continuation lines; and name?
_OF_IPYTHON = re.compile(
    r"(?m)^([ \t]*)((?:[\w.,\[\] \t]{1,200}=[ \t]*)?[!%](?:[^\\\n]|\\[\s\S])*|\??[\w.]{1,200}\?{1,2}[ \t]*$)"
)
# The first of their arguments may name a secret, and the next ones are its value.
_TAKES_NAME = {"get", "getenv", "pop", "setdefault", "setenv", "putenv", "setattr", "set_password"}
_NAMES_FIRST = {"get", "getenv", "pop", "setdefault"}
# What these are called with says where a text is, or how to take it apart.
_READS = {
    "getpass", "input", "open", "Path", "get_secret", "get_password", "read_text", "split", "rsplit", "strip", "lstrip",
    "rstrip", "partition", "rpartition", "removeprefix", "removesuffix", "replace", "encode", "decode", "group",
}  # fmt: skip
_SCHEMES = {"", "bearer", "basic", "token"}


@dataclass(frozen=True)
class Part:
    """text[start:end] of a cell is a string literal, a comment, or lines of IPython ("other")."""

    start: int
    end: int
    kind: Literal["secret", "string", "other"]


def is_secret_name(name: str) -> bool:
    """Whether a variable, argument, key or option of this name holds a secret."""
    return _NAME_ENDS.search(name[-80:]) is not None


def may_name_secret(name: str) -> bool:
    """Whether it may: its value is a secret where `looks_random` says so."""
    return _PERHAPS_ENDS.search(name[-80:]) is not None


def is_secret(name: str, value: str) -> bool:
    """Whether this value of that name is one."""
    return is_secret_name(name) or (may_name_secret(name) and looks_random(value))


def with_masked_body(source: str) -> str:
    """A string literal with its own prefix and quotes, and `***` in them; an empty one stays."""
    found = re.fullmatch(r"(?s)([rbfuRBFU]*)(\"\"\"|'''|\\?[\"'])(.*)\2", source)
    return f"{found[1]}{found[2]}{MASK}{found[2]}" if found is not None and found[3] else source


def parts_of(text: str) -> list[Part] | None:
    """The literals, comments and lines of IPython of a cell, in order; None where the rest is not Python."""
    # ASCII of the same length: places are the same in characters, for the parser, in bytes
    plain = re.sub(r"[^\x00-\x7f]|\r", lambda found: " " if found[0] == "\r" else "x", text)
    magics: list[Part] = []
    code, tree = plain, _parsed(plain)
    if tree is None:
        magics = [Part(*found.span(), "other") for found in _OF_IPYTHON.finditer(plain)]
        code = _OF_IPYTHON.sub(lambda found: f"{found[1]}pass" + "\n" * found[0].count("\n"), plain)
        tree = _parsed(code)
    if tree is None:
        return None
    found = [leaf for value in _values(tree, is_secret_name) for leaf in _leaves(value)]
    found += [leaf for value in _values(tree, may_name_secret) for leaf in _leaves(value) if _is_random(leaf)]
    secret = sorted({_span(leaf) for leaf in found})
    starts = [0, *accumulate(len(line) + 1 for line in plain.split("\n"))]
    try:
        tokens = list(_literals(code, secret))
    except (tokenize.TokenError, SyntaxError):
        return None
    parts = [Part(starts[a[0] - 1] + a[1], starts[b[0] - 1] + b[1], kind) for a, b, kind in tokens]
    return sorted([*parts, *magics], key=lambda part: part.start)


def _parsed(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


Place = tuple[int, int]  # line from 1, column from 0


def _span(node: ast.expr) -> tuple[Place, Place]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _literals(
    code: str, secret: list[tuple[Place, Place]]
) -> Iterator[tuple[Place, Place, Literal["secret", "string", "other"]]]:
    """Strings and comments; of strings in braces of an f-string only the f-string."""
    firsts = [first for first, _ in secret]
    depth, opened = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(code, newline="\n").readline):
        name = tokenize.tok_name[token.type]
        if name == "COMMENT":
            yield token.start, token.end, "other"
        if name == "FSTRING_START":  # Python 3.12 and later
            depth, opened = depth + 1, opened if depth else token.start
        if name == "FSTRING_END":
            depth -= 1
        if depth or name not in ("STRING", "FSTRING_END"):
            continue
        start = opened if name == "FSTRING_END" else token.start
        place = bisect_right(firsts, start) - 1
        is_secret = place >= 0 and token.end <= secret[place][1]
        yield start, token.end, "secret" if is_secret else "string"


Names = Callable[[str], bool]


def _values(tree: ast.Module, names: Names) -> Iterator[ast.expr]:
    """What is given to such a name."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _assigned(target, value, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _assigned(target, value, names)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield from _assigned(target, value, names)
            case ast.keyword(arg=str(name), value=value) if names(name):
                yield value
            case ast.Dict(keys=keys, values=values):
                yield from (value for key, value in zip(keys, values, strict=True) if _says(key, names))
            case ast.arguments():
                yield from _defaults(node, names)
            case ast.Call():
                yield from _called(node, names)
            case ast.List(elts=words) | ast.Tuple(elts=words):  # a command line: "--token", "value"
                yield from (word for before, word in pairwise(words) if _is_option(before, names))


def _assigned(target: ast.expr, value: ast.expr, names: Names) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for one, given in zip(target.elts, value.elts, strict=False):
            yield from _assigned(one, given, names)
    elif isinstance(target, ast.Name):
        yield from [value] if names(target.id) else []
    elif isinstance(target, ast.Attribute):
        yield from [value] if names(target.attr) else []
    elif isinstance(target, ast.Subscript) and _says(target.slice, names):
        yield value


def _defaults(given: ast.arguments, names: Names) -> Iterator[ast.expr]:
    by_place = [*given.posonlyargs, *given.args]
    last = by_place[len(by_place) - len(given.defaults) :]
    for name, value in [
        *zip(last, given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]:
        if value is not None and names(name.arg):
            yield value


def _called(call: ast.Call, names: Names) -> Iterator[ast.expr]:
    """The default of getenv("X_TOKEN", ...) and add_argument("--token", default=...), and what a login gets."""
    name = _name_of(call)
    if name in _TAKES_NAME:
        place = next((place for place, given in enumerate(call.args) if _says(given, names)), len(call.args))
        yield from call.args[place + 1 :]
        if place < len(call.args):
            yield from (keyword.value for keyword in call.keywords if keyword.arg in ("default", "value"))
        if name == "set_password":
            yield from call.args[-1:]
    elif name == "login":
        yield from call.args
        yield from (keyword.value for keyword in call.keywords if keyword.arg == "key")
    elif any(_is_option(given, names) for given in call.args):
        yield from (keyword.value for keyword in call.keywords if keyword.arg in ("default", "const"))


def _name_of(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _says(node: ast.expr | None, names: Names) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and names(node.value)


def _is_option(node: ast.expr, names: Names) -> bool:
    return _says(node, names) and isinstance(node, ast.Constant) and str(node.value).startswith("--")


def _is_random(leaf: ast.expr) -> bool:
    """Whether a string literal, or the text between the braces of an f-string, looks like a secret."""
    if isinstance(leaf, ast.JoinedStr):
        return any(map(_is_random, leaf.values))
    value = getattr(leaf, "value", None)
    return looks_random(value.decode(errors="replace") if isinstance(value, bytes) else str(value))


def _leaves(value: ast.expr) -> Iterator[ast.expr]:
    """String literals in an expression that can become its value: no keys, no conditions, no names of variables."""
    todo: list[ast.AST] = [value]
    while todo:
        match todo.pop():
            case ast.Constant(value=str() | bytes()) as leaf:
                yield leaf
            case ast.JoinedStr(values=parts) as leaf:
                texts = [str(part.value).strip().lower() for part in parts if isinstance(part, ast.Constant)]
                if any(text not in _SCHEMES for text in texts):
                    yield leaf
            case ast.Compare():
                pass
            case ast.IfExp(body=body, orelse=orelse):
                todo += [body, orelse]
            case ast.Subscript(value=of):
                todo.append(of)
            case ast.Dict(values=values):
                todo += values
            case ast.Call() as call:
                name = _name_of(call)
                given = call.args[1:] if name in _NAMES_FIRST else call.args
                todo += [call.func, *([] if name in _READS else [*given, *call.keywords])]
            case other:
                todo += ast.iter_child_nodes(other)
