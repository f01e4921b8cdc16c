"""The datasets of a configuration as pictures: what `dataset check` finds in a separate process, and their captions."""
