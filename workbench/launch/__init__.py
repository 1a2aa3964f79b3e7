"""Starts workbenches: `wb.open`, `wb.attach`, scripts, and `wb doctor`."""
