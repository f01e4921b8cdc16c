"""Job files of clusters that replay settings: torchrun, SLURM, Kubernetes, Kubeflow, SkyPilot, dstack.

Fields to fill in are comments. A job gets other machines each time, so no file holds an address. Command
lines are quoted for bash.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.files.config_files import PREFIX
from simpletuner.settings.values.spelling import as_text


@dataclass(frozen=True)
class Exported:
    """A text to save, and the command that replays it from a file of this name."""

    text: str
    name: str
    command: list[str]

    def replay(self, path: str = "") -> str:
        """The command for a shell, with the path where the text was saved."""
        names = {
            prefix + self.name: prefix + (path or self.name)
            for prefix in ("", "--config=", "--deepspeed_config=", "--filename=")
        }
        return format_command([names.get(word, word) for word in self.command])


def as_flags(values: Mapping[str, object]) -> list[str]:
    """A list becomes one flag per item, an empty one JSON: no flag at all would leave its default."""
    return [
        f"--{name}={as_text(item)}"
        for name, value in values.items()
        for item in ((value or [[]]) if isinstance(value, list) else [value])
    ]


def format_command(words: list[str]) -> str:
    """Format a command for bash; several flags get a line each."""
    first = next((index + 1 for index in reversed(range(len(words))) if not words[index].startswith("--")), 0)
    parts = (word.partition("=") for word in words[first:])
    flags = [name + equals + quoted(value) for name, equals, value in parts]
    return (" \\\n  " if len(flags) > 1 else " ").join([" ".join(map(quoted, words[:first])), *flags]) + "\n"


def quoted(word: str) -> str:
    """Quote a word on one line for bash: what is not printable is written as escaped bytes, in any locale."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        character if character.isprintable() and character not in "\\'" else escaped(character) for character in word
    )
    return f"$'{''.join(shown)}'"


def escaped(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    return "\\n" if character == "\n" else "".join(f"\\x{byte:02x}" for byte in character.encode())


SAVE_SECONDS = 300
"""Time that a run has to save and stop after it was asked to."""
# Cores per rank that files propose: threads decode images during training.
CPUS_PER_RANK = 8
RESTARTS = 10
"""Number of times that a failed job is started again, from its newest checkpoint."""
OF_A_JOB = ("machine_rank", "main_process_ip")
"""Settings that each job decides anew."""
OF_TORCHRUN = (*OF_A_JOB, "main_process_port", "num_machines", "num_processes")
"""Settings that torchrun decides."""
ENDPOINT = "--rdzv-endpoint=$HEAD:29400"
MEET = ("--rdzv-id=simpletuner", "--rdzv-backend=c10d", ENDPOINT)
MASTER_OF_JOB = f"""\
# The first node of this job, by its name in SLURM, or by SLURM's address where no host has that name.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
getent hosts "$first" > /dev/null || first=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export {PREFIX}MAIN_PROCESS_IP=$first
"""
# srun's exit code is the highest: 143 of a machine that was stopped because another one failed would hide
# why. The trap keeps bash alive until the run has saved, and does not reach the run, which gets the signal
# from Slurm itself.
NODE_OF_SLURM = """\
trap : TERM INT HUP; simpletuner train --machine_rank="$SLURM_NODEID" "$@"; code=$?; \
case $code in 129|130|143) [ "$SLURM_PROCID" != 0 ] || echo $code > "$STOPPED"; code=0;; esac; exit $code"""
JOBS = Path(__file__).parent / "jobs"
PLACE = re.compile(r"^( *)%\{(\w+)\}\n|%\{(\w+)\}", re.MULTILINE)


def to_torchrun(settings: Settings, values: dict[str, object]) -> Exported:
    """A script for every machine, whose ranks torchrun starts, and starts again when one has failed."""
    machines = settings.launch.num_machines
    meet = ["--standalone"] if machines == 1 else [f"--nnodes={machines}", *MEET]
    start = ["exec", *torchrun(settings, *meet, f"--max-restarts={RESTARTS}"), *flags_without(values, OF_TORCHRUN)]
    # The address is what the caller's variable holds, in double quotes.
    command = format_command(start).replace(f"'{ENDPOINT}'", f'"{ENDPOINT}"')
    name = "torchrun-one.sh" if machines == 1 else "torchrun.sh"
    return Exported(filled(name, settings, command=command), "torchrun.sh", ["bash", "torchrun.sh"])


def to_slurm(settings: Settings, values: dict[str, object]) -> Exported:
    """An sbatch script: one launcher per node, which starts that node's ranks."""
    # srun's default lets the other nodes run on when one has failed (KillOnBadExit=0 in slurm.conf).
    node = ["bash", "-c", NODE_OF_SLURM, "simpletuner"]
    start = ["srun", "--kill-on-bad-exit=1", *node, *flags_without(values, OF_A_JOB)]
    text = filled(
        "simpletuner.sbatch",
        settings,
        gpus="" if settings.launch.use_cpu else f"#SBATCH --gpus-per-node={ranks_per_machine(settings)}\n",
        master="" if settings.launch.num_machines == 1 else MASTER_OF_JOB,
        command=format_command(start),
    )
    return Exported(text, "simpletuner.sbatch", ["sbatch", "simpletuner.sbatch"])


def to_kubernetes(settings: Settings, values: dict[str, object]) -> Exported:
    # The pods find one another by the names of a headless service.
    words = started(settings, values, "$JOB_COMPLETION_INDEX", "simpletuner-machines-0-0.simpletuner")
    return applied("jobset.yaml", settings, words)


def to_kubeflow(settings: Settings, values: dict[str, object]) -> Exported:
    """A TrainJob of Kubeflow Trainer, whose runtime tells torchrun of the other nodes."""
    return applied("trainjob.yaml", settings, [*torchrun(settings), *flags_without(values, OF_TORCHRUN)])


def to_skypilot(settings: Settings, values: dict[str, object]) -> Exported:
    """A task for `sky jobs launch`, which finds machines and restarts the task on others after preemption."""
    words = started(settings, values, "$SKYPILOT_NODE_RANK", '$(sed -n 1p <<< "$SKYPILOT_NODE_IPS")')
    cards = "" if settings.launch.use_cpu else f"accelerators: H100:{ranks_per_machine(settings)}\n"
    text = filled("sky.yaml", settings, cards=cards, command=format_command(words))
    return Exported(text, "sky.yaml", ["sky", "jobs", "launch", "sky.yaml"])


def to_dstack(settings: Settings, values: dict[str, object]) -> Exported:
    """A task for `dstack apply`, which starts it on each node of a fleet."""
    words = started(settings, values, "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP")
    cards = "" if settings.launch.use_cpu else f"gpu: 80GB:{ranks_per_machine(settings)}\n"
    text = filled("simpletuner.dstack.yml", settings, cards=cards, command=format_command(words))
    return Exported(text, "simpletuner.dstack.yml", ["dstack", "apply", "-f", "simpletuner.dstack.yml"])


def ranks_per_machine(settings: Settings) -> int:
    return settings.launch.num_processes // settings.launch.num_machines


def flags_without(values: Mapping[str, object], names: tuple[str, ...]) -> list[str]:
    return as_flags({name: value for name, value in values.items() if name not in names})


def torchrun(settings: Settings, *options: str) -> list[str]:
    return ["torchrun", *options, f"--nproc-per-node={ranks_per_machine(settings)}", "-m", "simpletuner", "train"]


def on_each_machine(number: str, address: str = "") -> list[str]:
    """Command that starts a machine's ranks, before its flags; bash fills in its number and the address."""
    ip = f' --main_process_ip="{address}"' if address else ""
    return ["bash", "-c", f'exec simpletuner train --machine_rank="{number}"{ip} "$@"', "simpletuner"]


def started(settings: Settings, values: Mapping[str, object], number: str, address: str) -> list[str]:
    """Command of every machine of a job; `number` and `address` are variables that the cluster sets."""
    one = settings.launch.num_machines == 1
    return [*(["simpletuner", "train"] if one else on_each_machine(number, address)), *flags_without(values, OF_A_JOB)]


def applied(name: str, settings: Settings, words: list[str]) -> Exported:
    """Return a file for `kubectl apply` whose container runs a command."""
    import yaml

    ranks = ranks_per_machine(settings)
    # Kubernetes replaces $(NAME) in commands, and writes $ for $$.
    command = yaml.safe_dump([word.replace("$", "$$") for word in words], allow_unicode=True, width=float("inf"))
    cards = "" if settings.launch.use_cpu else f"limits: {{nvidia.com/gpu: {ranks}}}\n"
    resources = f"{cards}requests: {{cpu: {ranks * CPUS_PER_RANK}}}\n"
    text = filled(name, settings, command=command, resources=resources)
    return Exported(text, name, ["kubectl", "apply", f"--filename={name}"])


def filled(name: str, settings: Settings, **values: str) -> str:
    """File of `jobs/` with its places filled: `%{name}`, alone on a line for several lines, or for none."""
    values |= {
        "machines": str(settings.launch.num_machines),
        "cpus": str(ranks_per_machine(settings) * CPUS_PER_RANK),
        "seconds": str(SAVE_SECONDS),
        "restarts": str(RESTARTS),
    }

    def value_of(place: re.Match[str]) -> str:
        margin, lines, word = place.groups()
        return values[word] if word else indent(values[lines], margin)

    return PLACE.sub(value_of, (JOBS / name).read_text(encoding="utf-8"))


CLUSTERS: dict[str, Callable[[Settings, dict[str, object]], Exported]] = {
    "torchrun": to_torchrun,
    "slurm": to_slurm,
    "kubernetes": to_kubernetes,
    "kubeflow": to_kubeflow,
    "skypilot": to_skypilot,
    "dstack": to_dstack,
}
