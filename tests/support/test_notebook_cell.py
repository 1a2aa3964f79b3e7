from __future__ import annotations

import nbformat
from nbclient import NotebookClient

CELLS = [
    "from workbench.support.notebook_cell import code_of_cell, running_cell",
    "cell = running_cell(); print(cell.number); print(code_of_cell(cell.number))",
    "import asyncio; await asyncio.sleep(0); print(running_cell().number)",
]


def test_a_cell_knows_its_own_number_and_code() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    NotebookClient(notebook, kernel_name="python3").execute()
    printed = ["".join(output.text for output in cell.outputs) for cell in notebook.cells]
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    assert printed == ["", f"2\n{CELLS[1]}\n", "3\n"]
