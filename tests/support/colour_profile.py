"""ICC profiles (version 2) for tests, since none may be copied here: primaries or greys with a gamma."""

from __future__ import annotations

import struct

ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
"""XYZ of red, green and blue, adapted to the white of profiles (D50)."""
D50 = (0.9642, 1.0, 0.8249)


def number(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def xyz(values: tuple[float, float, float]) -> bytes:
    return b"XYZ " + bytes(4) + b"".join(map(number, values))


def gamma_curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)


def make_profile(primaries: tuple[tuple[float, float, float], ...], gamma: float) -> bytes:
    """Return an RGB profile; without primaries, one of greys."""
    tags = {b"wtpt": xyz(D50), b"cprt": b"text" + bytes(4) + b"none" + bytes(4)}
    tags[b"desc"] = b"desc" + bytes(4) + struct.pack(">I", 2) + b"x\0" + bytes(79)
    for name, values in zip((b"r", b"g", b"b"), primaries, strict=False):
        tags |= {name + b"XYZ": xyz(values), name + b"TRC": gamma_curve(gamma)}
    if not primaries:
        tags[b"kTRC"] = gamma_curve(gamma)
    start = 128 + 4 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(data), len(content))
        data += content + bytes(-len(content) % 4)
    space = b"RGB " if primaries else b"GRAY"
    head = bytes(4) + struct.pack(">I", 0x02400000) + b"mntr" + space + b"XYZ " + bytes(12) + b"acsp" + bytes(28)
    head += b"".join(map(number, D50)) + bytes(48)
    return struct.pack(">I", start + len(data)) + head + table + data
