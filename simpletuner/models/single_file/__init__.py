"""Models in one file: recognised, converted, and written."""
