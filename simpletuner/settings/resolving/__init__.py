"""Merging sources into settings, with the origin of each value."""
