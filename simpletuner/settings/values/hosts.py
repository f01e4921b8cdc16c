"""Addresses: of a machine (an IP address or a host name, without port or scheme), of a page, of a repository on the
hub."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

# RFC 1035: labels of at most 63 characters, 253 in all as text.
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)
LONGEST = 253


def check_host(host: str) -> str:
    """Return the address as it came. Raises ValueError for what no name service could look up."""
    if not host or is_ip(host):
        return host
    if found := re.fullmatch(r"(?P<host>[^:/]+|\[[^\]/]+\]):(?P<port>\d+)", host):
        raise ValueError(f"write {found['host'].strip('[]')}, and the port as main_process_port={found['port']}")
    if "://" in host:
        raise ValueError("use an address without `://` and what is around it, such as 10.0.0.1")
    labels = host.removesuffix(".").split(".")
    if all(label.isdecimal() for label in labels):
        raise ValueError("this is no IP address; one has four numbers from 0 to 255, such as 10.0.0.1")
    if len(host) > LONGEST or not all(map(is_label, labels)):
        raise ValueError("use an IP address or a host name")
    return host


def check_url(url: str) -> str:
    """Return the address of a page as it came. Raises ValueError for one that nothing can be posted to."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if url and not (usable and url.isascii() and url.isprintable() and " " not in url):
        raise ValueError("use an address such as https://example.org/hook")
    return url


def check_repository(name: str) -> str:
    """Return the id of a repository on the hub as it came. Raises ValueError for what cannot be one."""
    # 96 characters is the limit of huggingface_hub (utils/_validators.py, 2.4).
    if name and not (re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name, re.ASCII) and len(name) <= 96):
        raise ValueError("use OWNER/NAME or NAME, of letters, digits, `-`, `_` and `.`")
    return name


def check_kernel(name: str) -> str:
    """Return a kernel of the hub as it came. Raises ValueError for one without an owner or a whole commit."""
    repository, _, commit = name.partition("@")
    if name and not ("/" in repository and re.fullmatch(r"[0-9a-f]{40}", commit)):
        raise ValueError("use OWNER/NAME@COMMIT, with a commit of 40 hex digits: a branch may change")
    check_repository(repository)
    return name


def is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_label(label: str) -> bool:
    """Return whether a part of a name can be looked up; letters beyond ASCII are encoded for that."""
    try:
        return LABEL.fullmatch(label.encode("idna").decode()) is not None
    except UnicodeError:
        return False
