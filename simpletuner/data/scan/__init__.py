"""Scans of datasets: names, headers and captions of files, and the scan cache."""
