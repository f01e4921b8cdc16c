"""The editor of a config file, and the dialogs that fill its fields."""
