"""The description of a workbench, and its checks before a process starts."""
