"""Training: the trainer and its engines, optimizers, EMA, checkpoints, metrics, validation and reports."""
