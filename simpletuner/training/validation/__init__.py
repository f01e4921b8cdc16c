"""Validation images and held-out loss."""
