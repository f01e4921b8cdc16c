"""Optional dependencies and the commands that install them, each by its own name.

`simpletuner` on the package index is another program, which an extra of that name would install instead.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.errors import EnvironmentNotReady

if TYPE_CHECKING:
    from importlib.metadata import Distribution

EXTRAS = {
    "tensorboard": ("tensorboard>=2.18",),
    "wandb": ("wandb>=0.22",),
    "deepspeed": ("deepspeed>=0.18",),
    "torchao": ("torchao>=0.18", "torch>=2.10", "peft>=0.21"),
    "s3": ("obstore>=0.12", "boto3>=1.35"),
    "heif": ("pillow-heif>=1.6",),
    "video": ("av>=17",),
    "kernels": ("kernels>=0.17",),
    "page": ("starlette>=1.3.1", "uvicorn>=0.34"),
}
"""The optional dependencies of pyproject.toml, with which a test compares them."""
OTHER_PROGRAM = "This is not the package `simpletuner` of the package index, which is another program."
# Modules that the other program has in its package, and this one has not.
OF_THE_OTHER = ("helpers", "cli")
ENTRY_POINT = "simpletuner.app:main"


def install_command(extra: str) -> str:
    return f"pip install {shlex.join(EXTRAS[extra])}"


def check_installation(package: Path) -> str:
    """Return a warning where the other program of this name is installed, too; empty where it is not.

    Raises EnvironmentNotReady where its files are among those of this one, in `package`.
    """
    mixed = [name for name in OF_THE_OTHER if (package / name).exists() or (package / f"{name}.py").exists()]
    if mixed:
        raise EnvironmentNotReady(
            f"{package} holds files of another program of the same name ({', '.join(mixed)})",
            f"{sys.executable} -m pip uninstall simpletuner, until it finds none; then install this one again",
        )
    if others := list(other_programs()):
        version, place = others[0].version, others[0].locate_file("")
        return f"simpletuner {version} in {place} is another program of the same name; this one is in {package}"
    return ""


def other_programs() -> Iterator[Distribution]:
    if all(ENTRY_POINT in text for text in declared_programs()):
        return
    from importlib.metadata import distributions  # takes 10 ms, of a command that answers after 200

    for each in distributions(name="simpletuner"):
        programs = [point.value for point in each.entry_points if point.group == "console_scripts"]
        if programs and ENTRY_POINT not in programs:
            yield each


def declared_programs() -> Iterator[str]:
    """Yield what packages of this name, and of names that begin with it, say of their programs."""
    for place in sys.path:
        for file in Path(place).glob("[sS]imple*-info/entry_points.txt"):
            if file.parent.name.lower().startswith("simpletuner"):
                yield file.read_text("utf-8", "replace")
