"""Checkpoints and exported pipelines: tensors on disk, independent of engine and number of ranks."""
