"""Decoding images: formats, colour profiles, sizes and crops."""
