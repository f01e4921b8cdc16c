"""Files of other programs become ours. No torch."""
