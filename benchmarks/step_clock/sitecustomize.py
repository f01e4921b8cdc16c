"""Note wall and CPU time after each step of any optimizer of torch, in the file that STEP_CLOCK names.

Beside it, `.modules` has the modules that were imported before the first step, and `.status` the kernel's account of
the process then, with its memory.

Python imports this module at its start where PYTHONPATH has its folder. It imports nothing of torch itself: the
program that is measured decides when that happens.
"""

# pyright: basic, reportMissingParameterType=false, reportUnknownParameterType=false, reportOptionalMemberAccess=false
# typing is not imported, either.

import os
import sys
import time
from importlib.util import find_spec

OPTIMIZER = "torch.optim.optimizer"


class AfterImport:
    """Finder that registers the hook once torch's optimizers have been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != OPTIMIZER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            module.register_optimizer_step_post_hook(note)

        spec.loader.exec_module = execute_and_register
        return spec


def note(*_):
    """Write the seconds since the epoch, the CPU seconds of this process and its starter, and of the starter alone.

    Ranks after the first write to files of their own, such as `CLOCK.1`.
    """
    clock, rank = os.environ["STEP_CLOCK"], os.environ.get("RANK", "0")
    clock = clock if rank == "0" else f"{clock}.{rank}"
    if not os.path.exists(clock):  # noqa: PTH110
        with open(clock + ".modules", "w") as file:  # noqa: PTH123
            file.write("\n".join(sorted(name for name, module in sys.modules.items() if module)))
        with open("/proc/self/status") as status, open(clock + ".status", "w") as file:  # noqa: PTH123
            file.write(status.read())
    starter = starter_seconds()
    with open(clock, "a") as file:  # noqa: PTH123  as little as possible is imported
        file.write(f"{time.time()} {time.process_time() + starter} {starter}\n")


def starter_seconds():
    """Return the CPU seconds of the command if it runs the training in a process of its own."""
    parent = os.getppid()
    if parent == int(os.environ["STEP_CLOCK_OWNER"]):
        return 0.0
    with open(f"/proc/{parent}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if "STEP_CLOCK" in os.environ:
    sys.meta_path.insert(0, AfterImport())
