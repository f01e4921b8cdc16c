"""Runs that wait for this machine's GPUs, and are started one after another."""
