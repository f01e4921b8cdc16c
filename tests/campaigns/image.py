"""Run the steps of the Dockerfile in a folder that holds a Debian or Ubuntu, where no Docker engine is at hand.

    debootstrap --variant=minbase --include=ca-certificates bookworm ROOT
    python tests/campaigns/image.py ROOT [NAME=VALUE ...]

Root only. The base image and its CUDA are not part of this: the folder stands for them. NAME=VALUE are variables of the
steps, such as those of a proxy.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def steps_of(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions behind FROM, in their order."""
    lines = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    found = [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]
    yield from found[[name for name, _ in found].index("FROM") + 1 :]


def copy_files(words: list[str], folder: Path) -> None:
    *sources, target = words
    for each in sources:
        place = folder / target / each if target.endswith("/") else folder / target
        if (ROOT / each).is_dir():
            shutil.copytree(ROOT / each, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / each, place)


def run(root: Path, folder: str, variables: dict[str, str], command: str) -> None:
    line = f"cd {shlex.quote(folder)} && {command}"
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "chroot",
        root,
        "/bin/sh",
        "-ec",
        f"mount -t proc none /proc; {line}",
    ]
    subprocess.run(words, env=variables, check=True)


def main(root: Path, given: dict[str, str]) -> None:
    (root / "etc" / "resolv.conf").write_bytes(Path("/etc/resolv.conf").read_bytes())
    (root / "etc" / "hosts").write_bytes(Path("/etc/hosts").read_bytes())
    variables, folder = (
        {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **given},
        "/",
    )
    for name, rest in steps_of((ROOT / "Dockerfile").read_text()):
        print(f"\n{name} {rest}", flush=True)
        started = time.monotonic()
        match name:
            case "RUN":
                run(root, folder, variables, rest)
            case "ENV":
                key, _, value = rest.partition("=")
                variables[key] = re.sub(r"\$(\w+)", lambda found: variables.get(found[1], ""), value)
            case "WORKDIR":
                folder = rest
                (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                copy_files(rest.split(), root / folder.lstrip("/"))
            case "ENTRYPOINT":
                run(root, folder, variables, f"{' '.join(shlex.quote(each) for each in words_of(rest))} --help")
            case _:
                raise SystemExit(f"this script does not know {name}")
        print(f"{time.monotonic() - started:.0f} s", flush=True)


def words_of(text: str) -> list[str]:
    """Return the strings of a JSON list."""
    return re.findall(r'"([^"]*)"', text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(each.split("=", 1) for each in sys.argv[2:]))
