"""What runs leave to find again: where it lies, who uses it, and how it is cleared. No torch."""
