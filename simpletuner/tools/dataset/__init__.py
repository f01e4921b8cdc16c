"""What `simpletuner dataset` does."""
