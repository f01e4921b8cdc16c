"""Fixtures of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from simpletuner.app import main


@pytest.fixture
def sampled(capsys) -> Callable[..., tuple[list[Path], str]]:
    """Run `simpletuner sample` in this process; return the images that it prints, and what it said."""

    def run(*words: object, code: int = 0) -> tuple[list[Path], str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["sample", *map(str, words)])
        if dist.is_initialized():  # after an error it ends with the process
            dist.destroy_process_group()
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        return [Path(line) for line in said.out.splitlines()], " ".join(said.err.split())

    return run
