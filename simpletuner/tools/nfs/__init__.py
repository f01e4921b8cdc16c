"""Check a shared folder from all nodes at once: can a run on many machines live in it? No torch."""
