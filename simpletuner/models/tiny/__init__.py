"""The flavour `tiny`: each family's architecture with few, narrow layers and random weights, for the demo and tests."""
