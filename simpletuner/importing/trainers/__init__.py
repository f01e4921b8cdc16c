"""Other trainers, a module each: the table of its keys, and functions of their meaning."""
