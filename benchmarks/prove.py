"""The proof for every lesson: notebook and exported script at small settings, every metric compared.

    python benchmarks/prove.py [LESSON ...]

Prints a row a lesson; the exit code is 1 if one does not agree. The tables are written to runs/proofs/.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pandas as pd  # noqa: E402

from workbench.errors import WorkbenchError  # noqa: E402
from workbench.export import export_notebook  # noqa: E402
from workbench.export.cells import read_notebook  # noqa: E402
from workbench.export.proof import prove  # noqa: E402


def main() -> int:
    folder = Path("runs") / "proofs"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    lessons = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in lessons:
        began = time.monotonic()
        row: dict[str, object] = {"lesson": path.stem}
        try:
            script = export_notebook(path, folder / f"{path.stem}.py", runs=[])
            proof = prove(path, script.text, read_notebook(path).small_settings())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            row["verdict"] = "failed"
        else:
            (folder / f"{path.stem}.txt").write_text(f"{proof}\n")
            compared = proof.table[proof.table["metrics"] > 0]
            row |= {
                "calls": len(compared),
                "metrics": int(compared["metrics"].sum()),
                "largest_difference": compared["largest_difference"].max(),
                "tolerance": proof.tolerance,
                "verdict": "equal" if proof.ok else "differs",
            }
        rows.append({**row, "took_s": round(time.monotonic() - began)})
        print(pd.DataFrame([rows[-1]]).to_string(index=False, header=len(rows) == 1), flush=True)
    print(pd.DataFrame(rows).to_string(index=False))
    return 0 if all(row["verdict"] == "equal" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
