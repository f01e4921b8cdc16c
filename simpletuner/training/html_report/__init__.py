"""`output_dir/report.html`: curves, validation images, settings, data and checkpoints of a run in one file."""
