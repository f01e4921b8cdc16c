"""DeepSpeed before a run: whether this machine can, what a choice costs in memory, which choice fits. No torch."""
