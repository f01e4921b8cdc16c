"""One short file per subcommand; heavy imports stay inside the functions."""
