"""Measurement of the network between the ranks of a run, before the run.

measure   pairs and all-reduces within a given time
results   the numbers, and which pairs are slow (no torch)
check     one rank, from joining the others to the result
planned   the share of communication in a planned step
"""
