"""Model families: one class each, with a preset in TOML and a tiny pipeline; and what opens, checks and detects models."""
