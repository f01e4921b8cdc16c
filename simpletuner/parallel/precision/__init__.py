"""Low-precision weights, compute and optimizer state: float8, quantized, split bfloat16."""
