"""The global order of samples: buckets to batches, epochs, resumable states."""
