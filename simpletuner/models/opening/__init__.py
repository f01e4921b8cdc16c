"""Opening a base model: the folder of a run, completeness, LoRA files."""
