"""Move weights between layouts: the elements that ranks hold and need, and the slices that they send each other.

    weights.py     a model's weights and how each is split, from its config
    plan.py        which rank holds which elements, as boxes (`boxes.py`), and plans from one distribution to another
    strategies.py  the three transitions from training to generation (a subclass adds another one); `wb reshard`
    engine.py      executes a plan on live tensors, with checksums of the sent slices
    patches.py     the changes of a weight since it was last sent

Only the last two need torch (weights.py too, for the shapes of a model), and only the engine needs a process group.
"""
