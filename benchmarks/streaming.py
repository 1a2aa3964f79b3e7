"""Prompts of a source that is larger than memory: seconds to open it, memory, and prompts a second, by number of rows.

    make bench NAME=streaming                       # a .jsonl and a .parquet file of 100,000 and of 10,000,000 rows
    make bench NAME=streaming ARGS="--rows 1000000"

Each case runs in a process of its own. The files are written to a temporary folder, 75 bytes a row (.parquet: 15).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DRAWN = 20_000  # prompts
AT_ONCE = 100_000  # rows that are written at once


def written(folder: Path, ending: str, rows: int) -> Path:
    """A file of so many sums."""
    path = folder / f"{rows}{ending}"
    if ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        first = pyarrow.Table.from_pylist(next(_rows(AT_ONCE)))
        with parquet.ParquetWriter(path, first.schema) as file:
            for chunk in _rows(rows):
                file.write_table(pyarrow.Table.from_pylist(chunk))
    else:
        with path.open("w") as lines:
            for chunk in _rows(rows):
                lines.writelines(json.dumps(row) + "\n" for row in chunk)
    return path


def _rows(count: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, count, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count))
        yield [{"prompt": f"What is {n} + {n % 97}? Answer with a number.", "answer": str(n + n % 97)} for n in numbers]


def measure(path: Path) -> dict[str, float]:
    """Of opening the file as a stream, and drawing prompts of it."""
    import psutil

    from workbench.data.streamed_prompts import StreamedPrompts
    from workbench.models import load_tokenizer

    tokenizer, process = load_tokenizer("tiny-llama-tied"), psutil.Process()
    for module in ("pyarrow.parquet", "pyarrow.ipc")[: path.suffix == ".parquet"]:
        __import__(module)
    before = process.memory_info().rss
    began = time.perf_counter()
    prompts = StreamedPrompts(path, tokenizer=tokenizer)
    opened_s = time.perf_counter() - began
    opened = process.memory_info().rss
    began, most, first_s = time.perf_counter(), opened, 0.0
    for n in range(DRAWN // 100):
        prompts.next(100)
        first_s = first_s or time.perf_counter() - began
        most = max(most, process.memory_info().rss) if n % 10 == 0 else most
    drawn_s = time.perf_counter() - began
    return {
        "opened_s": opened_s, "first_100_s": first_s, "prompts_a_second": DRAWN / drawn_s,
        "opened_bytes": opened - before, "most_bytes": most - before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 10_000_000])
    parser.add_argument("--endings", nargs="+", default=[".jsonl", ".parquet"], choices=[".jsonl", ".parquet"])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for ending in options.endings:
            for rows in options.rows:
                path = written(Path(folder), ending, rows)
                command = [sys.executable, __file__, "--measure", str(path)]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
                found = json.loads(told)
                print(
                    f"{ending} of {rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB: opened in "
                    f"{found['opened_s']:.3f} s, first 100 prompts after {found['first_100_s']:.2f} s, "
                    f"{found['prompts_a_second']:,.0f} prompts/s; memory +{found['opened_bytes'] / 1e6:,.0f} MB to "
                    f"open, at most +{found['most_bytes'] / 1e6:,.0f} MB in {DRAWN:,} prompts",
                    flush=True,
                )
                path.unlink()


if __name__ == "__main__":
    main()
