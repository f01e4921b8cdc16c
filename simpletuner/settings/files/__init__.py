"""Config files: TOML, YAML, JSON and environment files, and the values in them."""
