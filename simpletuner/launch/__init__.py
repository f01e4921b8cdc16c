"""Start the ranks of one or many machines, supervise them, and shut them down together. No torch at import."""
