"""What a forked rank runs. Nothing heavy is imported here: `warm.py` is what the fork server holds ready."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

SMALL_UNET = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [32, 64],
    "transformer_layers_per_block": [1, 1],
    "attention_head_dim": [2, 4],
}
"""Two levels instead of three: 212 weights instead of 408, and what a run costs is what its weights cost."""
SMALLER = {
    "sdxl": SMALL_UNET,
    **dict.fromkeys(
        ("sd1x", "sd2x"),
        {
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
            "block_out_channels": [32, 64],
            "attention_head_dim": [2, 4],
        },
    ),
}
"""What the tiny pipelines of tests have otherwise than those that users get, by family."""


def as_rank(function: Callable[..., None], rank: int, world: int, port: int, log: str, *arguments: Any) -> None:
    """Become one rank of a world, say everything into a log, and run a function."""
    with Path(log).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    if world > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    function(*arguments)


def command_line(arguments: list[str]) -> None:
    """Run the real command line in this process."""
    import simpletuner.app

    simpletuner.app.main(arguments)


def command_line_with(variables: dict[str, str], arguments: list[str]) -> None:
    """Run the command line with more environment variables, which the fork server does not know."""
    os.environ.update(variables)
    command_line(arguments)


def command_line_at_hub(variables: dict[str, str], arguments: list[str]) -> None:
    """Run the command line with another hub, whose address huggingface_hub has read when it was imported."""
    os.environ.update(variables)
    import importlib

    from huggingface_hub import constants, hf_api

    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT
    command_line(arguments)


def machine_at_hub(variables: dict[str, str], arguments: list[str]) -> None:
    """Run the command line as a machine of its own: rank 0 has the model already, the others ask the hub."""
    own = {"HF_HUB_OFFLINE": "1"} if os.environ["RANK"] == "0" else {"HF_HOME": variables["HF_HOME"] + "-of-others"}
    command_line_at_hub(variables | own, arguments)


def command_line_beside(folder: str, arguments: list[str]) -> None:
    """Run the command line where modules of a folder can be imported."""
    sys.path.insert(0, folder)
    command_line(arguments)


def command_line_killed_once(file: str, arguments: list[str]) -> None:
    """Run the command line, and kill this process when it opens any other file after this one is in its place."""

    def look(event: str, _: tuple[object, ...]) -> None:
        if event == "open" and Path(file).exists():
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    command_line(arguments)


def run_python(code: str, folder: str) -> None:
    """Run a program in a folder, as a user would who has copied it from a page."""
    os.chdir(folder)
    exec(compile(code, "<card>", "exec"), {"__name__": "__main__"})


def run_script(path: str, *arguments: str) -> None:
    """Run another program's script, as `python` would that has torch loaded."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def build_pipeline(family: str, folder: str) -> None:
    """Write the tiny pipeline of a family, as small as tests need it."""
    from simpletuner.models.catalog.registry import load_preset
    from simpletuner.models.tiny.build import build_preset

    preset = load_preset(family)
    assert preset is not None and preset.tiny is not None
    changes = {"unet": SMALLER[family]} if family in SMALLER else {}
    build_preset(preset.tiny, **changes).save_pretrained(folder)


def command_line_at(folders: list[str], arguments: list[str]) -> None:
    """Run the command line of each rank in a folder of its own, as on machines that share nothing."""
    import simpletuner.app

    os.chdir(folders[int(os.environ["RANK"])])
    os.environ["LOCAL_RANK"] = "0"  # the first rank of a machine looks at its files
    simpletuner.app.main(arguments)
