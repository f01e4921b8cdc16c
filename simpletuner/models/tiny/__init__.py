"""The flavour `tiny`: a family's architecture, few narrow layers, random weights; for demo and tests."""
