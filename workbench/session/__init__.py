"""The life of an open workbench: its views, placement changes, recovery, code reloads, checkpoints."""
