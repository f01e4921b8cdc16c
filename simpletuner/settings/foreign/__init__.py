"""Files of other programs that a run reads: accelerate's YAML and DeepSpeed's JSON."""
