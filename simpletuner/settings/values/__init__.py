"""Values that are text with a form: hosts, sizes, ranges, trackers."""
