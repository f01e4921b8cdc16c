"""Editors, one per format: each yields candidate texts, the likeliest first; editing.py checks them."""
