"""What starting the ranks of one machine costs: an interpreter each, as today, or one that has imported all and forks.

A rank has started when it has imported what every run imports. Memory is what each has of its own (USS) then.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from functools import partial

import psutil
from interleaved import print_table, seconds_in_turns

ROUNDS = 3
IMPORTS = "import gc; gc.disable(); import simpletuner.worker, diffusers.loaders, transformers"
WAITS = 'os.write(1, b"%d\\n" % os.getpid()); sys.stdin.read()'  # one write, since ranks share the pipe
FORKS = f"""
import os, sys
{IMPORTS}
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
{WAITS}
"""

memory: dict[str, list[float]] = {}


def start(name: str, count: int, code: str, arguments: list[list[str]]) -> None:
    """Start ranks, wait until all have imported everything, note their memory, and end them."""
    read, write = os.pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, *each], stdin=subprocess.PIPE, stdout=write, env=environment)
        for each in arguments
    ]
    os.close(write)
    with os.fdopen(read) as started:
        pids = [int(started.readline()) for _ in range(count)]
    own = [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in pids]
    memory.setdefault(name, []).append(sum(own))
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def main() -> None:
    """Print seconds and memory for 1 to 8 ranks."""
    code = f"import os, sys\n{IMPORTS}\n{WAITS}"
    ways = {}
    for count in (1, 2, 4, 8):
        ways[f"{count} interpreters"] = (count, code, [[]] * count)
        ways[f"{count} forked"] = (count, FORKS, [[str(count)]])
    contestants = {name: partial(start, name, *way) for name, way in ways.items()}
    seconds = seconds_in_turns(contestants, ROUNDS)
    rows = [
        [name, f"{statistics.median(seconds[name]):.1f}", f"{statistics.median(memory[name]):,.0f}"] for name in ways
    ]
    print_table(
        f"ranks of one machine with {os.cpu_count()} cores ({ROUNDS} rounds)", ["ranks", "s", "MiB in all"], rows
    )


if __name__ == "__main__":
    main()
