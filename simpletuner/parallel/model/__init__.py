"""Changes to a model before it is wrapped: checkpointing, attention backends, fused projections."""
