"""The description of a workbench, and the checks of it before any process starts."""
