"""Batches: columns, where their rows lie, the handle in the notebook, the store, files."""
