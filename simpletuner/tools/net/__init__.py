"""Measurement of the network between the ranks of a run, before the run."""
