"""How long a test waits for what must come."""

from __future__ import annotations

PATIENCE = 240.0
"""Seconds; nothing is measured by it. A command that answers in 5 s alone took 20 s beside the workers of a busy CI."""
