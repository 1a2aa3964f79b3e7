"""Turn a notebook into a script, and prove that both give the same metrics.

export_notebook(notebook, output, ...): write the script; returns it with notes for its reader.
prove(...): run both, and compare every metric.
"""

from workbench.export.exporting import Script as Script
from workbench.export.exporting import export_notebook as export_notebook

__all__ = ["Script", "export_notebook"]
