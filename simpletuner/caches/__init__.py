"""Latents and text embeddings, computed once and stored in shards; outdated records are never read."""
