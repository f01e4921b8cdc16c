"""What machines, or ranks, must have in common, and the sentence that says where two of them differ."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simpletuner import __version__
from simpletuner.errors import EnvironmentNotReady, SettingsError, SimpleTunerError
from simpletuner.launch.signing import printable
from simpletuner.settings import Loaded, settings_as_json
from simpletuner.system.network import own_address_towards

PACKAGES = ("torch", "diffusers", "transformers", "accelerate")
MAY_DIFFER = ("machine_rank", "main_process_ip", "gpu_ids", "node_join_timeout", "run_secret_file")
"""Settings that say where a machine is and what it has, not what is trained."""


@dataclass(frozen=True)
class NodeInfo:
    """Who somebody is, and what all must agree about; plain values, so that it can travel as JSON."""

    host: str
    pid: int
    settings: dict[str, Any]
    versions: dict[str, str]
    address: str = ""
    """With which address a machine reaches machine 0."""
    nonce: str = ""
    """Machine 0's is part of all signatures of the run."""

    def as_json(self) -> dict[str, Any]:
        """Return the card as plain values, from which `Card(**values)` makes it again."""
        return asdict(self)


def node_info(loaded: Loaded) -> NodeInfo:
    """Return the card of this process. Folders count with their full path, since each machine has its own `.`."""
    launch = loaded.settings.launch
    settings = {name: value for name, value in settings_as_json(loaded).items() if name not in MAY_DIFFER}
    settings["output_dir"] = str(loaded.settings.training.output_dir.absolute())
    ip = launch.main_process_ip
    address = own_address_towards(ip, launch.main_process_port) if ip else ""
    return NodeInfo(socket.gethostname(), os.getpid(), settings, versions(), address, secrets.token_hex(8))


def parse_node_info(values: Mapping[str, Any] | None) -> NodeInfo | None:
    """Return the card that another process wrote; None if it is none."""
    match values:
        case {"host": str(host), "pid": int(pid), "settings": dict(settings), "versions": dict(versions)}:
            address, nonce = values.get("address", ""), values.get("nonce", "")
            if isinstance(address, str) and isinstance(nonce, str) and (not address or is_address(address)):
                settings = {printable(name): value for name, value in settings.items()}
                versions = {printable(name): version for name, version in versions.items()}
                return NodeInfo(printable(host), pid, settings, versions, address, nonce)
    return None


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def versions() -> dict[str, str]:
    """Return the versions that decide what a run computes, read without importing the packages."""
    found = {"simpletuner": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def difference(first: NodeInfo, first_name: str, other: NodeInfo, other_name: str) -> SimpleTunerError | None:
    """Return the error that names every difference with both values and both places; None where there is none."""
    names = (f"{first_name} ({first.host})", f"{other_name} ({other.host})")
    settings = differing(first.settings, other.settings, names)
    packages = differing(first.versions, other.versions, names)
    if settings:
        hint = "give every machine the same flags and config file; only --machine_rank differs"
        return SettingsError("\n  ".join(settings + packages), hint)
    if packages:
        return EnvironmentNotReady("\n  ".join(packages), "install the same versions on every machine")
    return None


def check_addresses(cards: Sequence[NodeInfo]) -> None:
    """Refuse an address that means machine 0 to the others and the loopback device to machine 0 itself.

    Its ranks would wait for the others there. Raises SettingsError.
    """
    inside = [card.address for card in cards if card.address and is_loopback(card.address)]
    if cards[0].address in inside and len(inside) < len(cards):
        raise SettingsError(
            f"main_process_ip leads machine 0 to its loopback address {cards[0].address}, which others cannot reach",
            "give the address of its network card as --main_process_ip, or correct /etc/hosts on machine 0",
        )


def is_loopback(address: str) -> bool:
    """Return whether an address never leaves the machine."""
    return ipaddress.ip_address(address).is_loopback


def differing(first: dict[str, Any], other: dict[str, Any], names: tuple[str, str]) -> list[str]:
    """Return a sentence for each name with two values."""
    return [
        f"{name} differs: {first.get(name)!r} on {names[0]}, {other.get(name)!r} on {names[1]}"
        for name in [*first, *(name for name in other if name not in first)]
        if first.get(name) != other.get(name)
    ]
