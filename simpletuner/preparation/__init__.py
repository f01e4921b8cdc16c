"""From settings to data that can be trained on; what ranks share of it."""
