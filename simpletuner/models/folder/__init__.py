"""Folders in diffusers format: reading, checking, weights."""
