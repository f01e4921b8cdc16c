"""Atomic writes, opening regular files, locks, checksums, paths."""
