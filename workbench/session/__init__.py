"""The life of an open workbench: what it looks like, moving, recovering, reloading, checkpoints."""
