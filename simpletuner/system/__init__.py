"""Lowest layer: files, locks, signals, network, imports and number formats; above only errors and report."""
