"""Identity of machines and ranks: the facts that must agree, and reports of differences."""

from __future__ import annotations

import ipaddress
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from simpletuner import __version__
from simpletuner.errors import EnvironmentNotReady, SettingsError, SimpleTunerError
from simpletuner.launch.store import sanitize
from simpletuner.settings import Loaded, settings_as_json
from simpletuner.system.files.lease_record import boot_id, pid_namespace
from simpletuner.system.network import own_address_towards

PACKAGES = ("torch", "diffusers", "transformers", "accelerate")
# Settings about a machine's place and equipment, not training; and rank 0's own settings.
MAY_DIFFER = (
    "machine_rank",
    "main_process_ip",
    "gpu_ids",
    "node_join_timeout",
    "run_secret_file",
    "notify_url",
    "notify_format",
)


@dataclass(frozen=True)
class NodeInfo:
    """Facts that a machine, a rank or a node of `nfs check` registers, as JSON."""

    host: str
    pid: int
    settings: dict[str, Any]
    versions: dict[str, str]
    address: str = ""
    """Address of this machine on its route to machine 0."""
    nonce: str = ""
    """Random per process. Machine 0's is part of all signatures of the run."""
    uid: int = -1
    boot: str = ""
    """Identity of this boot of this machine and of its container; empty if unknown."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def has_ended(self) -> bool:
        # It ran here, and its pid is free.
        return bool(self.boot) and self.boot == boot_of_machine() and not Path(f"/proc/{self.pid}").exists()


def identify(settings: dict[str, object], versions: dict[str, str], address: str = "") -> NodeInfo:
    nonce = secrets.token_hex(8)
    return NodeInfo(
        socket.gethostname(), os.getpid(), settings, versions, address, nonce, os.geteuid(), boot_of_machine()
    )


def node_info(loaded: Loaded) -> NodeInfo:
    launch = loaded.settings.launch
    settings = {name: value for name, value in settings_as_json(loaded).items() if name not in MAY_DIFFER}
    # absolute: each machine has its own current folder
    settings["output_dir"] = str(loaded.settings.training.output_dir.absolute())
    ip = launch.main_process_ip
    return identify(settings, versions(), own_address_towards(ip, launch.main_process_port) if ip else "")


def parse_node_info(values: Mapping[str, Any]) -> NodeInfo | None:
    match values:
        case {"host": str(host), "pid": int(pid), "settings": dict(settings), "versions": dict(versions)}:
            address, nonce = values.get("address", ""), values.get("nonce", "")
            uid, boot = values.get("uid", -1), values.get("boot", "")
            texts = isinstance(address, str) and isinstance(nonce, str) and isinstance(boot, str)
            if texts and isinstance(uid, int) and (not address or is_address(address)):
                settings = {sanitize(name): value for name, value in settings.items()}
                versions = {sanitize(name): version for name, version in versions.items()}
                return NodeInfo(sanitize(host), pid, settings, versions, address, nonce, uid, boot)
    return None


def boot_of_machine() -> str:
    return f"{boot} {namespace}" if (boot := boot_id()) and (namespace := pid_namespace()) else ""


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@cache  # 6 ms: each package's metadata is a mail of a thousand lines, and a start asks three times
def versions() -> dict[str, str]:
    """Return the versions of what decides the results, without importing the packages."""
    from importlib.metadata import PackageNotFoundError, version

    # Not Python's third number, which decides no result.
    found = {"simpletuner": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def difference(first: NodeInfo, first_name: str, other: NodeInfo, other_name: str) -> SimpleTunerError | None:
    """Make the error that lists every difference with both values and both places; None if there is none."""
    names = (f"{first_name} ({first.host})", f"{other_name} ({other.host})")
    settings = differing(first.settings, other.settings, names)
    packages = differing(first.versions, other.versions, names)
    if settings:
        hint = "give every machine the same flags and config file; only --machine_rank differs"
        return SettingsError("\n  ".join(settings + packages), hint)
    if packages:
        return EnvironmentNotReady("\n  ".join(packages), "install the same versions on every machine")
    return None


def differing(first: Mapping[str, object], other: Mapping[str, object], names: tuple[str, str]) -> list[str]:
    return [
        f"{name} differs: {first.get(name)!r} on {names[0]}, {other.get(name)!r} on {names[1]}"
        for name in [*first, *(name for name in other if name not in first)]
        if first.get(name) != other.get(name)
    ]


def check_local_ranks(infos: Sequence[NodeInfo], rank: int, environment: Mapping[str, str]) -> None:
    """Refuse several ranks on one machine without LOCAL_RANK: each would list the images. `infos` are of all
    ranks.

    Raises SettingsError.
    """
    if len(infos) == 1 or "LOCAL_RANK" in environment:
        return
    beside = [number for number, info in enumerate(infos) if info.boot and info.boot == infos[rank].boot]
    if len(beside) > 1:
        raise SettingsError(
            f"ranks {', '.join(map(str, beside))} run on {infos[rank].host} without LOCAL_RANK, which says "
            "which of them does what one rank of a machine does for all",
            "set LOCAL_RANK from 0 on each machine (0 for all where each sees a GPU of its own), or let torchrun do so",
        )


def check_addresses(infos: Sequence[NodeInfo]) -> None:
    """Refuse a main_process_ip that is machine 0 for the others, but the loopback device on machine 0 itself.

    Ranks of machine 0 would bind to the loopback device, where the others cannot reach them. Raises
    SettingsError.
    """
    inside = [info.address for info in infos if info.address and ipaddress.ip_address(info.address).is_loopback]
    if infos[0].address in inside and len(inside) < len(infos):
        raise SettingsError(
            f"main_process_ip leads machine 0 to its loopback address {infos[0].address}, which others cannot reach",
            "give the address of its network card as --main_process_ip, or correct /etc/hosts on machine 0",
        )
