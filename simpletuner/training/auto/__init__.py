"""Settings that a run chooses: compiling, recomputation, memory."""
