"""Parquet and CSV tables of images, and images that are named by URL."""
