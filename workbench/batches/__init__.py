"""Batches: tables whose columns lie on the hosts; their handle in the notebook, the store that keeps them, files."""
