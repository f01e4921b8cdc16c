"""FLOPs, traces of a step, and detection of blocks."""
