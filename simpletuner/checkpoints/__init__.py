"""Checkpoints and exported pipelines: named tensors on disk, the same for every engine and number of ranks."""
