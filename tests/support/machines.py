"""Machines in miniature: network namespaces joined by a cable, each with its own address and host name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from flags import last_wins
from patience import PATIENCE

PORT = "29501"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Command:
    """A command on one machine, and what it said."""

    process: subprocess.Popen
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = PATIENCE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs:\n{self.said}") from None


@dataclass
class Machine:
    """One namespace: its name, its address, and its end of the cable."""

    name: str
    address: str
    cable: str
    folder: Path
    commands: list[Command] = field(default_factory=list)
    disks: dict[Path, Path] = field(default_factory=dict)
    """What this machine has at a path that leads elsewhere on the others: path -> folder."""

    def start(self, *command: str, **environment: str) -> Command:
        """Start a command here, with the namespace's network, and a host name and disks of its own."""
        log = self.folder / f"{self.name}-{len(self.commands)}.log"
        mounts = "".join(f"mount --bind {folder} {path} && " for path, folder in self.disks.items())
        booted = f'hostname {self.name} && {mounts} exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "sh", "-c", booted, "sh", *command]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with log.open("wb") as out:
            process = subprocess.Popen(inside, stdout=out, stderr=out, env=variables, start_new_session=True)
        self.commands.append(Command(process, log))
        return self.commands[-1]

    def train(self, *flags: str, **environment: str) -> Command:
        return self.start(sys.executable, "-m", "simpletuner", "train", *last_wins(flags), **environment)

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def ranks(self) -> dict[int, int]:
        """Return the pid of each rank that runs here."""
        found = {}
        for pid in self.pids():
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            named = dict(variable.partition(b"=")[::2] for variable in variables)
            if b"RANK" in named:
                found[int(named[b"RANK"])] = pid
        return found

    def kill(self) -> None:
        """End everything here at once, as a power cut does."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def unplug(self) -> None:
        """Take the cable out: nobody is told anything."""
        ip("-n", self.name, "link", "set", self.cable, "down")


def wire(folder: Path, prefix: str) -> list[Machine]:
    """Return two machines that reach each other. Raises CalledProcessError where namespaces are not allowed."""
    machines = [Machine(f"{prefix}{n}", f"10.88.7.{n + 1}", f"{prefix}e{n}", folder) for n in range(2)]
    for machine in machines:
        ip("netns", "add", machine.name)
    first, second = machines
    ip("-n", first.name, "link", "add", first.cable, "type", "veth", "peer", "name", second.cable, "netns", second.name)
    for machine in machines:
        ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
        for device in ("lo", machine.cable):
            ip("-n", machine.name, "link", "set", device, "up")
    return machines


def wire_to_switch(folder: Path, prefix: str, count: int) -> list[Machine]:
    """Return machines that reach each other by a switch. Raises CalledProcessError where namespaces are not allowed."""
    switch, bridge = f"{prefix}{count}", "bridge"
    machines = [Machine(f"{prefix}{n}", f"10.88.9.{n + 1}", f"{prefix}e{n}", folder) for n in range(count)]
    for name in (switch, *(machine.name for machine in machines)):
        ip("netns", "add", name)
    ip("-n", switch, "link", "add", bridge, "type", "bridge")
    ip("-n", switch, "link", "set", bridge, "up")
    for number, machine in enumerate(machines):
        port = f"port{number}"
        ip("-n", machine.name, "link", "add", machine.cable, "type", "veth", "peer", "name", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", bridge, "up")
        ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
        for device in ("lo", machine.cable):
            ip("-n", machine.name, "link", "set", device, "up")
    return machines


def slow_down(machine: Machine, other: Machine, rate: str) -> None:
    """Let a machine send no more than this rate, such as 100mbit, to one other.

    Raises CalledProcessError where tc cannot do so.
    """
    to_other = ("protocol", "ip", "u32", "match", "ip", "dst", other.address)
    for kind, *arguments in (
        ("qdisc", "root", "handle", "1:", "htb"),
        ("class", "parent", "1:", "classid", "1:1", "htb", "rate", rate),
        ("filter", "parent", "1:", *to_other, "flowid", "1:1"),
    ):
        command = ["tc", "-n", machine.name, kind, "add", "dev", machine.cable, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)


def tear_down(prefix: str, count: int = 2) -> None:
    """End what still runs in so many namespaces, and remove them, which takes the cables along."""
    for n in range(count):
        machine = Machine(f"{prefix}{n}", "", "", Path())
        machine.kill()
        end = time.monotonic() + 5
        while machine.pids() and time.monotonic() < end:
            time.sleep(0.05)
        subprocess.run(["ip", "netns", "del", machine.name], capture_output=True)
