"""Prints the benchmarks, with the first line of what each one says of itself."""

from __future__ import annotations

import ast
from pathlib import Path

NOT_BENCHMARKS = ("curves", "list", "models")  # what others import, and this


def main() -> None:
    print('make bench NAME=... [ARGS="..."]')
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem not in NOT_BENCHMARKS:
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            print(f"  {file.stem:20} {text.splitlines()[0]}")


if __name__ == "__main__":
    main()
