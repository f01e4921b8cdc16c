"""Run tests with the lowest versions that pyproject.toml allows, and with the newest there are, on several Pythons.

    .venv/bin/python tests/campaigns/versions.py [--python=3.12] [--resolution=lowest-direct|highest] [TESTS...]

uv makes a virtual environment in a temporary folder: 3 to 6 GB, since torch's builds are those of the package index.
pytest and what tests alone need are the newest. README.md has what was found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = ("page", "s3", "video", "heif", "tensorboard", "torchao", "deepspeed")
TESTS = [
    "tests/settings",
    "tests/data",
    "tests/caches",
    "tests/checkpoints",
    "tests/importing",
    "tests/models/test_predictions.py",
    "tests/models/opening",
    "tests/parallel/precision",
    "tests/training",
    "tests/end_to_end/test_training.py",
    "tests/end_to_end/test_lora.py",
    "tests/end_to_end/test_parity.py",
    "tests/end_to_end/test_families.py",
]
"""Where libraries change under a project: their models, arrays, files and command lines; whole runs of each kind."""


def test_tools() -> list[str]:
    """Return what tests need besides the project, without floors, which are of pyproject's `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {Requirement(each).name for name in EXTRAS for each in project["optional-dependencies"][name]}
    tools = {Requirement(each).name for each in project["optional-dependencies"]["dev"]} - ours
    return sorted(tools - {"wandb", "kernels", "pyright", "ruff", "codespell", "import-linter"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.11")
    parser.add_argument("--resolution", choices=("lowest-direct", "highest"), default="lowest-direct")
    parser.add_argument("tests", nargs="*", default=TESTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        uv, venv = [sys.executable, "-m", "uv"], Path(name) / "venv"
        subprocess.run([*uv, "venv", "--quiet", f"--python={given.python}", str(venv)], check=True)
        python = venv / "bin" / "python"
        # torchao warns of its own source as it is compiled, which is an error in tests.
        install = [*uv, "pip", "install", "--quiet", "--compile-bytecode", f"--python={python}"]
        project = f"simpletuner[{','.join(EXTRAS)}] @ {ROOT.as_uri()}"
        subprocess.run([*install, f"--resolution={given.resolution}", project], check=True)
        listed = [*uv, "pip", "freeze", f"--python={python}"]
        frozen = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        kept = Path(name) / "kept.txt"
        kept.write_text("".join(line for line in frozen.splitlines(keepends=True) if " @ " not in line))
        subprocess.run([*install, f"--constraints={kept}", *test_tools()], check=True)
        subprocess.run([*uv, "pip", "uninstall", "--quiet", f"--python={python}", "simpletuner"], check=True)
        print(kept.read_text(), flush=True)
        paths = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            *given.tests,
        ]
        return subprocess.run(command, cwd=ROOT, env=paths, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
