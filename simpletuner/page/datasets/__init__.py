"""Datasets of a configuration as pictures: findings of `dataset check`, a process, and captions."""
