"""Decoding images and videos: formats, colour profiles, sizes, crops and clips."""
