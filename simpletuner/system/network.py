"""Network addresses, interfaces and listening sockets of this machine; HTTP requests by urllib."""

from __future__ import annotations

import array
import errno
import ipaddress
import socket
import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from urllib.request import Request

# Linux: list every IPv4 address with the name of its interface; see `man 7 netdevice`.
SIOCGIFCONF = 0x8912
# struct ifreq on 64 bits: 16 bytes of name, then a sockaddr whose IPv4 address begins 4 bytes later.
IFREQ_BYTES = 40
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def own_address_towards(host: str, port: int) -> str:
    """Find the local address from which a host is reached; empty if there is no route. Sends no packet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, _, _, _, destination = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(destination)  # for UDP this only looks up the route
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def interface_towards(host: str, port: int) -> str:
    """Find the name of the interface that leads to a host; empty where that cannot be determined.

    For an address of this machine itself: not the loopback device but the interface that other machines
    reach.
    """
    address = own_address_towards(host, port)
    return next((name for name, own in addresses() if address and own == address), "")


def addresses() -> Iterator[tuple[str, str]]:
    """Yield interface name and address for this machine's addresses; nothing outside Linux."""
    yield from ipv4_addresses()
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def ipv4_addresses(capacity: int = 256) -> Iterator[tuple[str, str]]:
    # ioctl, since the standard library lists interfaces without their addresses
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


def listen_on_all_addresses(port: int) -> socket.socket:
    """Listen on all addresses of this machine, IPv6 included where it works. Raises OSError."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # otherwise IPv6 is switched off in the kernel
                raise
    return socket.create_server(("", port))


def http_request(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Request:
    """Make a request; `user:password@` of the address is sent as Basic authentication, and not to where it
    redirects.

    Raises ValueError for what is no address.
    """
    from urllib.request import Request

    parts = urlsplit(url)
    credentials, has_credentials, host = parts.netloc.rpartition("@")
    request = Request(urlunsplit(parts._replace(netloc=host)), body, dict(headers or {}))
    if has_credentials:
        token = b64encode(unquote(credentials).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request
