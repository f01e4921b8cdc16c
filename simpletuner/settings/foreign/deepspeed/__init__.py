"""DeepSpeed's configuration as settings: what its JSON says becomes ours, and what we set becomes its JSON."""
