"""Resume every engine from the checkpoint of every engine, on 1, 2 and 4 ranks: 100 pairs, 5 minutes on 2 cores.

    .venv/bin/python tests/campaigns/resumes.py [--family=flux]

Weights, moments and EMA are compared bit for bit, and the losses of the two steps that follow.
`tests/end_to_end/test_zero.py` runs a sample of the pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from conftest import Starter, fork_server_context  # noqa: E402
from kills import fixtures  # noqa: E402
from resume_matrix import NAMES, resumed  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="flux")
    family = parser.parse_args().family
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder, starter = Path(name), Starter(fork_server_context(), Path(name))
        fixtures(folder, starter, family)
        places = {"base": folder / "base", "pictures": folder / "shapes", "folder": folder / "runs"}
        arguments = {"family": family, "ema": True, **{key: str(path) for key, path in places.items()}}

        def run_on(function: Any, world: int, *given: Any) -> dict[str, Any]:
            report = folder / f"report-{len(starter.started)}.json"
            run = starter.start(function, world, *given, str(report))
            if any(codes := run.wait(1800)):
                raise SystemExit(f"{world} ranks: exit codes {codes}\n{run.said}")
            return json.loads(report.read_text())

        for pair, faults in resumed(run_on, arguments, lambda _: NAMES):
            failed += bool(faults)
            print(f"{pair:40} {'; '.join(faults) or 'equal'}", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
