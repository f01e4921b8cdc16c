"""A node's card: which process it is, and on which machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def new_card(token: str, nodes: int) -> dict[str, Any]:
    """Return the card of this process."""
    return {
        "token": token,
        "nodes": nodes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "uid": os.geteuid(),
        "machine": machine(),
    }


def machine() -> str:
    """Return what tells this boot of this machine, and this container on it, from any other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def is_dead(card: dict[str, Any]) -> bool:
    """Return whether a card's process certainly is no more: it ran here, and its number is free."""
    return bool(card["machine"]) and card["machine"] == machine() and not Path(f"/proc/{card['pid']}").exists()
