"""First contact with a GPU: correctness, then speed and memory beside `plan`, in parts of any total time.

    python benchmarks/gpu check [--seconds=800] [--done=FILE...] [--plans=FILE] [PART...]
    python benchmarks/gpu plan FILE         what `plan` says of the steps, made before on a machine without a GPU
    python benchmarks/gpu table FILE... [--plans=FILE]
    python benchmarks/gpu errors [FILE...]  how far `plan` is from these steps, or from all figures and published ones
    python benchmarks/gpu rates             what `plan` reads: simpletuner/tools/plan/rates.toml
    python benchmarks/gpu part PART         one part, in this process

Weights and inputs are random, of the true shapes; nothing is downloaded. Each figure is a line of results.jsonl, in
$OUT or here, as soon as it is there; parts that a file of --done holds whole are not run again. --tiny runs the same
code with tiny models on the CPU. README.md in this folder says how a quarter of an hour with a GPU is spent.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("check", "plan", "table", "errors", "rates", "part"))
    parser.add_argument("names", nargs="*", help="parts, or files")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=800)
    parser.add_argument("--done", action="append", type=Path, default=[])
    parser.add_argument("--plans", type=Path)
    given = parser.parse_intermixed_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    from gpu.parts import all_parts, run_part

    if given.verb in ("check", "part") and (unknown := set(given.names) - set(all_parts())):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts are {'; '.join(all_parts())}")
    if given.verb in ("plan", "part") and len(given.names) != 1:
        parser.error(f"{given.verb} takes one {'part' if given.verb == 'part' else 'file'}")
    read = [*given.done, *(map(Path, given.names) if given.verb in ("table", "errors") else ())]
    if missing := [str(file) for file in read if not file.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}")
    if given.verb == "part":
        run_part(given.names[0], given.tiny)
        return 0
    if given.verb == "plan":
        from gpu.plans import plan_steps

        plan_steps(Path(given.names[0]), given.tiny)
        return 0
    from gpu.plans import print_errors, read_plans
    from gpu.rates import FIGURES, rates_as_toml
    from gpu.records import read_records
    from gpu.tables import print_tables

    files = [Path(name) for name in given.names]
    if given.verb == "rates":
        print(rates_as_toml(), end="")
        return 0
    if given.verb == "errors":
        print_errors(read_records(files or sorted(FIGURES.rglob("*.jsonl"))))
        return 0
    if given.verb == "check":
        from gpu.driver import Driver, gpu_gib

        if not given.tiny and not gpu_gib():
            print("error: there is no GPU here\nhint: --tiny runs the same code on the CPU", file=sys.stderr)
            return 3
        folder = Path(os.environ.setdefault("OUT", "."))
        folder.mkdir(parents=True, exist_ok=True)
        files = [*given.done, folder / "results.jsonl"]
        Driver(files[-1], folder / "parts.log", given.tiny).drive(given.seconds, given.names, given.done)
    print_tables(list(read_records(files)), read_plans(given.plans))
    return 0


ROOT = Path(__file__).parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]

if __name__ == "__main__":
    sys.exit(main())
