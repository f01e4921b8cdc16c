"""Filling a cache: jobs, workers, and records that are written while training."""
