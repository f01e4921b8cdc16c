"""Implementation of `simpletuner dataset`."""
