"""Batches of one rank: prefetching, and the random numbers of each sample."""
