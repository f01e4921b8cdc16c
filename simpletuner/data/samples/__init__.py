"""Samples of a run: discovery, aspect buckets, held-out images, warnings."""
