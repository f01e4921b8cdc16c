"""Settings as text: explained, exported, as a schema."""
