"""Image files that a run writes, and grids of them."""
