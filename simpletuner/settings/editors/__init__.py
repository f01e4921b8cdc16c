"""Editors, one per format: each yields candidate texts for an edit, the likeliest first; editing.py checks them."""
