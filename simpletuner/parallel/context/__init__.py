"""Context parallelism: sharding a sequence, and attention over its shards."""
