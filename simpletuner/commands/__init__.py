"""Subcommands, one short file each; heavy imports stay inside the functions."""
