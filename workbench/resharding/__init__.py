"""How weights move between layouts: what ranks hold, what they need, the slices that go from one to another.

    weights.py     a model's weights and how each is cut, from its config
    plan.py        which rank holds which elements, as boxes (`boxes.py`), and from one such distribution to another
    strategies.py  the three transitions from training to generation, to which a subclass adds one; `wb reshard`
    engine.py      executes a plan on live tensors, with checksums of what was sent
    patches.py     what changed of a weight since it was last sent

Only the last two need torch, beside the shapes of a model, and only the engine a process group.
"""
