"""How weights move between layouts: from a model's weights and two layouts to a schedule of slices, in bytes."""
