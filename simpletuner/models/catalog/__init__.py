"""Known families by name, their published checkpoints and architectures; no torch."""
