"""Machines in miniature: network namespaces joined by a cable, each with its own address and host name."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flags import last_wins
from forked_launcher import ForkedProcess, launch, run_elsewhere
from patience import PATIENCE

PORT = "29501"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x4000_0000
"""Namespaces of sched.h: mounts, host name, network. Python has them from 3.12 on."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Command:
    """A command on one machine, and what it said."""

    process: subprocess.Popen | ForkedProcess
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = PATIENCE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs:\n{self.said}") from None


def enter(name: str, mounts: dict[Path, Path]) -> None:
    """Move this process to a namespace, as `ip netns exec` does, with a host name and disks of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWUTS | CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(name)
    steps = ["mount --make-rslave /", "umount -l /sys", f"mount -t sysfs {name} /sys"]
    steps += [f"mount --bind {folder} {path}" for path, folder in mounts.items()]
    subprocess.run(["sh", "-c", " && ".join(steps)], check=True)


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
    fork_server: Any = None

    def start(self, *command: str, **environment: str) -> Command:
        """Start a command here, with the namespace's network, and a host name and disks of its own."""
        log = self.next_log()
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

    def train_forked(self, *flags: str, **environment: str) -> Command:
        return self.launch("train", *last_wins(flags), **environment)

    def launch(self, *arguments: str, **environment: str) -> Command:
        """Start a command of simpletuner here whose interpreters, and those of its ranks, are forked."""
        return self.fork(launch, str(self.folder), environment, [*arguments])

    def fork(self, action: Callable[..., None], *arguments: Any) -> Command:
        """Start a function here."""
        log, where = self.next_log(), partial(enter, self.name, self.disks)
        process = self.fork_server.Process(target=run_elsewhere, args=(where, str(log), action, *arguments))
        process.start()
        self.commands.append(Command(ForkedProcess(process), log))
        return self.commands[-1]

    def next_log(self) -> Path:
        return self.folder / f"{self.name}-{len(self.commands)}.log"

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def ranks(self) -> dict[int, int]:
        """Return the pid of each rank that runs here."""
        found = {}
        for pid in self.pids():
            try:
                variables = self.variables_of(pid)
            except OSError:
                continue
            if "RANK" in variables:
                found[int(variables["RANK"])] = pid
        return found

    def variables_of(self, pid: int) -> dict[str, str]:
        """Return the environment of a process here. Raises OSError if there is none with that number."""
        if (forked := self.folder / f"{pid}.json").exists():
            return json.loads(forked.read_text())
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(pair.partition("=")[::2] for pair in pairs if pair)

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


def say_lies(address: str, port: str) -> None:
    """Write into the store of a run what only its launchers and ranks may say."""
    from torch.distributed import TCPStore

    store = TCPStore(address, int(port), wait_for_workers=False)
    ending = '{"machine": 0, "exit_code": 0, "sentence": "well done", "hint": "", "said": false}'
    store.set("launchers/ending", ending)
    for machine in (0, 1):
        store.set(f"launchers/beat/{machine}", "5")
        store.set(f"simpletuner/failures/{machine}/reason", "{")
    store.set("simpletuner/lost", "0")


def wire(folder: Path, prefix: str, fork_server: Any = None) -> list[Machine]:
    """Return two machines that reach each other. Raises CalledProcessError where namespaces are not allowed."""
    ends = [(f"{prefix}{n}", f"10.88.7.{n + 1}", f"{prefix}e{n}") for n in range(2)]
    machines = [Machine(*each, folder, fork_server=fork_server) for each in ends]
    for machine in machines:
        ip("netns", "add", machine.name)
    first, second = machines
    ip("-n", first.name, "link", "add", first.cable, "type", "veth", "peer", "name", second.cable, "netns", second.name)
    for machine in machines:
        ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
        for device in ("lo", machine.cable):
            ip("-n", machine.name, "link", "set", device, "up")
    return machines


def wire_to_switch(folder: Path, prefix: str, count: int, fork_server: Any = None) -> list[Machine]:
    """Return machines that reach each other by a switch. Raises CalledProcessError where namespaces are not allowed."""
    switch, bridge = f"{prefix}{count}", "bridge"
    ends = [(f"{prefix}{n}", f"10.88.9.{n + 1}", f"{prefix}e{n}") for n in range(count)]
    machines = [Machine(*each, folder, fork_server=fork_server) for each in ends]
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
