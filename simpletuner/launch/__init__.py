"""Start the ranks of all machines, supervise them, end them together. No torch at import."""
