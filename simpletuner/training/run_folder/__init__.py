"""The output folder: resuming, settings, facts of a run."""
