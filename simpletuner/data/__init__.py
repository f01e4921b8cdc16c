"""Datasets, images, captions, aspect buckets, the global batch sampler, prefetching."""
