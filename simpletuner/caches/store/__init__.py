"""The record store: shards, their indices, serialization, compression, and mirrors of remote stores."""
