"""Devices: memory, GPU facts, copies to and from the host."""
