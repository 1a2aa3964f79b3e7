"""From notebook to script, and the proof that they agree.

export_notebook(notebook, output, ...): write the script; what its reader should know comes back with it.
prove(...): run both, and compare every metric.
"""

from workbench.export.exporting import Script as Script
from workbench.export.exporting import export_notebook as export_notebook

__all__ = ["Script", "export_notebook"]
