"""Recipes: settings to start a fine-tune from, one TOML file each, with the source of every number."""
