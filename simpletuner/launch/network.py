"""Find the network interface that leads to a machine, for libraries that would take another one."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

SIOCGIFCONF = 0x8912
"""Linux: list every IPv4 address with the name of its interface; see `man 7 netdevice`."""
IFREQ_BYTES = 40
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def own_address_towards(host: str, port: int) -> str:
    """Return the address with which this machine reaches a host; empty if there is no way. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, _, _, _, destination = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def interface_towards(host: str, port: int) -> str:
    """Return the name of the interface that reaches a host; empty where that cannot be found out.

    A machine's own address is reached through the loopback device, but it belongs to the interface that others reach.
    """
    address = own_address_towards(host, port)
    return next((name for name, own in addresses() if address and own == address), "")


def addresses() -> Iterator[tuple[str, str]]:
    """Yield every interface of this machine with an address it has; nothing where this is not Linux."""
    yield from ipv4_addresses()
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def ipv4_addresses(capacity: int = 256) -> Iterator[tuple[str, str]]:
    """Yield every interface with an IPv4 address it has."""
    try:
        import fcntl

        entries = array.array("B", bytes(IFREQ_BYTES * capacity))
        request = struct.pack("iL", len(entries), entries.buffer_info()[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, request)
    except (ImportError, OSError):
        return
    for start in range(0, struct.unpack("iL", answer)[0], IFREQ_BYTES):
        entry = entries[start : start + IFREQ_BYTES].tobytes()
        yield entry[:16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(entry[20:24])
