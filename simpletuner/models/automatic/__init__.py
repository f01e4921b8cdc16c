"""A family without a class: each prediction is made by the pipeline's own `__call__` (docs/families.md)."""
