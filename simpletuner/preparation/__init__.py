"""Data to train on, from the settings: samples, buckets, caches, and the parts that ranks share."""
