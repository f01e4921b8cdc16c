"""Processes and threads: starting Python, signals, activity, the status of a run."""
