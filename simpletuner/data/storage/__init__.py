"""Storage backends: local folders, object stores, datasets of the hub."""
