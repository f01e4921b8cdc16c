"""The original SimpleTuner's files: names, values, and what becomes of them."""
