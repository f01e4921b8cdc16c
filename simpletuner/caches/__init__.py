"""Latents and text embeddings, computed once and kept in shards that know when they lie."""
