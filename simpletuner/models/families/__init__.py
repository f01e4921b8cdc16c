"""One file per model family: what differs from the others, as one `Traits`."""
