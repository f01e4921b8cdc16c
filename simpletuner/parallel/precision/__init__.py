"""Low-precision weights, compute and optimizer state: float8, int8, split bfloat16."""
