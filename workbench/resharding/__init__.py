"""How weights move between layouts: what ranks hold, what they need, the slices that go from one to another.

    weights.py       a model's weights and how each is cut, from its config
    distribution.py  a layout on ranks: the elements that each rank holds, as boxes (`boxes.py`)
    plan.py          from one distribution to another: movements and figures; `Reshard`, between any two
    strategies.py    the three transitions from training to generation; to add one: a subclass and its line there
    report.py        `wb reshard`
    engine.py        executes a plan on live tensors (`views.py`: boxes as views; `checksums.py`: of what was sent)

Only the last needs a process group, and only it and the shapes of a model need torch.
"""
