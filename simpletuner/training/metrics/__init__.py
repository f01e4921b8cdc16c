"""Metrics: recording, reading, curves, throughput, trackers."""
