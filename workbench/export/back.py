"""From an exported script back to a notebook, whose export is the same script."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.export.program import lines_in_strings
from workbench.export.statements import first_line
from workbench.support.files import SHARED, path_of, read_text, write_bytes

RULE = "a script as `wb export` writes it: imports, definitions, and one function that is run at the end"


def notebook_of(script: str, name: str = "script") -> Any:
    """A notebook (nbformat 4.5) with the docstring as its first text, a cell of imports, one of parameters, one for
    each definition, and the body of main, cut where a comment has lines of its own. `BadInput` for a script of another
    shape."""
    from nbformat import v4

    try:
        tree = ast.parse(script)
    except SyntaxError as error:
        raise BadInput(f"{name}: {error}", RULE, "mend it") from None
    main = _main(tree, name)
    lines = script.splitlines()
    cells = []
    docstring = ast.get_docstring(tree, clean=False)
    if docstring:
        cells.append(v4.new_markdown_cell(f"# {docstring.strip()}"))
    body = [node for node in tree.body if node is not main and not _is_run(node) and not _is_docstring(node)]
    imports = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [line for line in imports if line != "from typing import Annotated"]
    if imports:
        cells.append(v4.new_code_cell("\n".join(imports)))
    if main.args.args:
        parameters = "\n".join(_parameter(script, arg, default) for arg, default in _arguments(main))
        cells.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    for node in body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            place = tree.body.index(node)
            start = tree.body[place - 1].end_lineno if place else 0  # with the comments above it
            cells += _pieces(lines[start : node.end_lineno])
    first, last = main.body[0], main.body[-1]
    assert last.end_lineno is not None
    start = _comment_start(lines, first.lineno - 1, main)
    inside = lines_in_strings(script)
    numbered = enumerate(lines[start : last.end_lineno], start + 1)
    nonlocal_lines = {n.lineno for one in main.body for n in _of_functions_here(one) if isinstance(n, ast.Nonlocal)}
    own = [line.replace("nonlocal ", "global ", 1) if n in nonlocal_lines else line for n, line in numbered]
    shifted = zip(range(start + 1, last.end_lineno + 1), own, strict=True)
    cells += _pieces([line if n in inside else line.removeprefix("    ") for n, line in shifted])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


def write_notebook(script: str | Path, output: str | Path) -> Path:
    """Write the notebook of a script file; returns its path."""
    import nbformat

    path, target = path_of(script, "script"), path_of(output, "output")
    try:
        source = read_text(path)
    except FileNotFoundError:
        raise BadInput(str(path), "a script that exists", "give the path of a .py file") from None
    text = nbformat.writes(notebook_of(source, path.name)) + "\n"
    write_bytes(target, text.encode(), mode=SHARED)
    return target


def _of_functions_here(statement: ast.stmt) -> list[ast.AST]:
    """Nodes in the functions of main, but not in their inner functions: there `nonlocal` means a variable of main."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        methods = [one for one in ast.walk(statement) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [node for method in methods for node in ast.walk(method)]
    return [node for one in statement.body for node in ast.walk(one)]


def _is_run(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _main(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function that the last lines run."""
    runs = [node for node in tree.body if _is_run(node)]
    called = {n.id for node in runs for n in ast.walk(node) if isinstance(n, ast.Name)}
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name in called]
    if len(functions) != 1:
        raise BadInput(f'{name} has no function that is run under `if __name__ == "__main__"`', RULE, "add one")
    return functions[0]


def _arguments(main: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[ast.arg, ast.expr]]:
    if len(main.args.args) != len(main.args.defaults):
        raise BadInput(f"{main.name} has an argument without a default", RULE, "give each one a default")
    return list(zip(main.args.args, main.args.defaults, strict=True))


def _parameter(script: str, argument: ast.arg, default: ast.expr) -> str:
    """An argument of main as an assignment with its help behind it."""
    annotation, text = argument.annotation, ""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        kind, told = annotation.slice.elts[:2] if _is_annotated(annotation) else (annotation, None)
        if told is not None:
            annotation, text = kind, f"  # {ast.literal_eval(told)}"
    value = ast.get_source_segment(script, default)
    try:
        plain = type(ast.literal_eval(default)).__name__ == ast.unparse(annotation) if annotation else True
    except ValueError:
        plain = False
    hint = "" if plain or annotation is None else f": {ast.unparse(annotation)}"
    return f"{argument.arg}{hint} = {value}{text}"


def _is_annotated(annotation: ast.Subscript) -> bool:
    return isinstance(annotation.value, ast.Name) and annotation.value.id == "Annotated"


def _comment_start(lines: Sequence[str], first: int, main: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Where the body of main begins, with the comments above its first statement."""
    start = first
    while start > main.lineno and (not lines[start - 1].strip() or lines[start - 1].strip().startswith("#")):
        start -= 1
    return start


def _pieces(lines: Sequence[str]) -> list[Any]:
    """Cells: a comment between blank lines is a text, the lines between two of these are code."""
    from nbformat import v4

    cells: list[Any] = []
    for block in _blocks(lines):
        if all(line.startswith("#") for line in block):
            text = "\n".join(line[2:] if line.startswith("# ") else line[1:] for line in block)
            cells.append(v4.new_markdown_cell(text))
        elif cells and cells[-1]["cell_type"] == "code":
            cells[-1]["source"] += "\n\n" + "\n".join(block)
        else:
            cells.append(v4.new_code_cell("\n".join(block)))
    return cells


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    """Runs of lines between blank lines at the margin; blank lines within a statement do not cut it."""
    text = "\n".join(lines).strip("\n")
    whole = text.split("\n")
    tree = ast.parse(text)
    inside = {n for node in tree.body for n in range(first_line(node), (node.end_lineno or 0) + 1)}
    blocks: list[list[str]] = [[]]
    for number, line in enumerate(whole, 1):
        if not line.strip() and number not in inside:
            blocks.append([])
        else:
            blocks[-1].append(line)
    return [block for block in blocks if block]
