"""Latents and text embeddings, computed once and stored in shards; records that no longer apply are never read."""
