"""Files, locks, signals and imports: what every other package may use, and what uses none of them."""
