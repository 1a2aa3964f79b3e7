"""How a workbench is started: `wb.open`, `wb.attach`, scripts, and `wb doctor`."""
