"""Where pictures come from, captions, aspect buckets, the global order, loading."""
