"""What a workbench is asked to be, and what must hold of that before a process starts."""
