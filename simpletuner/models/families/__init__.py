"""One file per model family: a subclass of ModelFamily that states what differs from the others."""
