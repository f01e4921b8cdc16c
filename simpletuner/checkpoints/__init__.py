"""Named tensors on disk, in one form for every engine and every number of ranks."""
