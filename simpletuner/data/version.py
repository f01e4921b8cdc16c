"""The version of what decides buckets and the order of samples: a run keeps the one that it began with.

1: each side of a bucket is rounded by itself, and all repeats are shuffled together (simpletuner 0.1.0).
2: the bucket that cuts least off, and repeats spread over the epoch.
"""

from __future__ import annotations

VERSION = 2
