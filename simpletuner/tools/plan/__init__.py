"""`simpletuner plan`: memory, time and disk of a run before it starts, without a GPU and without weights."""
