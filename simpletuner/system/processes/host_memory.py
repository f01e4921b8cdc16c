"""Available memory of the machine, within the limits of a container (Linux)."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes that processes can still get without swapping; 0 where that is unknown."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return min([fields.get("MemAvailable", 0), *available_in_group()])


def available_in_group() -> list[int]:
    """Bytes left below the limit of each control group (v2) of this process."""
    try:
        path = (PROC / "self" / "cgroup").read_text().rpartition("0::/")[2].strip()
    except OSError:
        return []
    left = []
    for folder in [CGROUP / path, *(CGROUP / path).parents]:
        try:
            limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # the root has no limit, and version 1 has other files
        if limit != "max":
            left.append(int(limit) - used + int(stat.get("file", 0)))  # the page cache gives way
    return left
