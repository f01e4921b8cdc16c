"""Bytes, FLOPs, kernel launches and seconds of a step, counted on fake tensors."""
