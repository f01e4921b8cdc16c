"""Model families: a class, a preset and a tiny pipeline each; and what opens, checks and detects models."""
