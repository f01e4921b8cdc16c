"""DeepSpeed: what it needs, the memory it takes, its engine, and the import of its checkpoints."""
