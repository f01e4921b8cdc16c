"""Launchers that others wrote, on this machine: what each does to a run of two ranks (table of docs/many-machines.md).

    .venv/bin/python tests/campaigns/real/launchers.py        # installs what is missing; ten minutes on two cores
    .venv/bin/python tests/campaigns/real/launchers.py hydra slurm

Slurm is a controller, two nodes and munge of its own, as root. `tests/launch/test_real_launchers.py` runs Hydra.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]

from installing import NotHere, free_port, from_apt, from_pip  # noqa: E402
from PIL import Image  # noqa: E402

PROGRAM = str(Path(sys.executable).with_name("simpletuner"))
WAIT_SECONDS = 600
SLURM = ("slurmctld", "slurmd", "slurm-client", "munge")


@dataclass
class Run:
    """A run of two ranks that a launcher starts."""

    folder: Path
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    model: Sequence[str] = ("--model_flavour=tiny",)
    """Flags of the model that is trained; one that is here already starts in 0.6 of the time."""

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self, *program: str) -> subprocess.Popen[bytes]:
        """Start the launcher in a session of its own, and wait until the run has trained two steps."""
        command = [*self.command, *(program or (PROGRAM, "train", *flags(self.folder, self.model)))]
        with (self.folder / "log").open("wb") as log:
            environment = {**os.environ, **self.variables, "OMP_NUM_THREADS": "1"}
            started = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        end = time.monotonic() + WAIT_SECONDS
        while self.steps() < 2:
            assert started.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.1)
        return started

    def steps(self) -> int:
        with suppress(FileNotFoundError):
            return (self.output / "metrics.jsonl").read_text().count('"loss"')
        return 0

    def ended(self, started: subprocess.Popen[bytes]) -> str:
        """Wait for the launcher; return whether the steps were saved, and its exit code."""
        code = started.wait(WAIT_SECONDS)
        saved = [*self.output.glob("checkpoints/checkpoint-*/state.json")]
        return f"{'saved' if saved else 'nothing saved'}, {code if code >= 0 else 128 - code}"

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, by rank; without those that only wait for one."""
        found: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                line = (entry / "cmdline").read_bytes().split(b"\0")
                pairs = (entry / "environ").read_bytes().split(b"\0")
                variables = dict(pair.partition(b"=")[::2] for pair in pairs)
                if f"--output_dir={self.output}".encode() in line and b"python" in line[0]:
                    names = (b"RANK", b"SLURM_PROCID", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")
                    rank = next((variables[name] for name in names if name in variables), b"of none")
                    found[int(rank)] = int(entry.name)  # torchrun itself has none
        return [found[rank] for rank in sorted(found)]


def flags(folder: Path, model: Sequence[str] = Run.model) -> list[str]:
    images = folder / "images"
    if not images.exists():
        images.mkdir()
        for number in range(8):
            Image.new("RGB", (64, 64), (number * 30, 80, 160)).save(images / f"{number}.png")
            (images / f"{number}.txt").write_text(f"a plain colour {number}")
    return [
        *("--use_cpu", "--model_family=sdxl", *model, f"--instance_data_dir={images}"),
        *("--resolution=64", "--resolution_type=pixel", "--train_batch_size=2", "--max_train_steps=100000"),
        *("--mixed_precision=no", "--fsdp_enable", f"--output_dir={folder / 'output'}"),
    ]


def sent(*numbers: signal.Signals) -> Callable[[Run, subprocess.Popen[bytes]], None]:
    """Return a function that signals the launcher itself, a quarter of a second apart."""

    def send(run: Run, started: subprocess.Popen[bytes]) -> None:
        for number in numbers:
            started.send_signal(number)
            time.sleep(0.25)

    return send


def advised(run: Run, started: subprocess.Popen[bytes]) -> None:
    """Do what the run itself said at its start."""
    advice = re.search(r"`((?:scancel --signal=TERM|kill -TERM) [\d.]+)`", run.said)
    assert advice is not None, run.said
    subprocess.run(advice[1].split(), check=True, env={**os.environ, **run.variables})


def kill_rank(run: Run, started: subprocess.Popen[bytes]) -> None:
    os.kill(run.ranks()[1], signal.SIGKILL)


Stop = Callable[[Run, subprocess.Popen[bytes]], None]
TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
SIGNALS: dict[str, Stop] = {"SIGTERM to it": sent(TERM), "Ctrl-C to it": sent(INT), "SIGHUP to it": sent(HUP)}
SRUN = {**SIGNALS, "Ctrl-C to it": sent(INT, INT)}


@contextmanager
def hydra(folder: Path, install: bool) -> Iterator[Run]:
    yield Run(folder, [str(from_pip("mpich==5.0.2", "mpiexec", install)), "-n", "2"])


@contextmanager
def open_mpi(folder: Path, install: bool) -> Iterator[Run]:
    program = from_apt(["openmpi-bin"], "mpirun.openmpi", install)
    yield Run(folder, [str(program), "--allow-run-as-root", "--oversubscribe", "-n", "2"])


@contextmanager
def torchrun(folder: Path, install: bool) -> Iterator[Run]:
    program = str(Path(sys.executable).with_name("torchrun"))
    yield TorchRun(folder, [program, "--standalone", "--nproc-per-node=2", "-m", "simpletuner", "train"])


class TorchRun(Run):
    def start(self, *program: str) -> subprocess.Popen[bytes]:
        return super().start(*(program or flags(self.folder, self.model)))


@contextmanager
def slurm(folder: Path, install: bool) -> Iterator[Run]:
    with cluster(folder, install) as variables:
        yield Run(folder, ["srun", "--nodes=1", "--ntasks=2"], variables)


@contextmanager
def cluster(folder: Path, install: bool) -> Iterator[Mapping[str, str]]:
    """Run a Slurm of two nodes on this machine; yield the variables by which its commands find it."""
    for package in SLURM:
        from_apt(SLURM, {"slurm-client": "srun", "munge": "munged"}.get(package, package), install)
    place = Path(tempfile.mkdtemp(prefix="slurm", dir=folder))  # munge wants a socket that others may reach
    for each in (folder, place):
        each.chmod(0o755)
    for name in ("state", "spool-n0", "spool-n1"):
        (place / name).mkdir()
    (place / "slurm.conf").write_text(slurm_conf(place))
    (place / "key").write_bytes(os.urandom(1024))
    (place / "key").chmod(0o600)
    own = {"SLURM_CONF": str(place / "slurm.conf")}
    environment, names = {**os.environ, **own}, ("munged", "slurmctld", "slurmd-n0", "slurmd-n1")
    files = [f"--{name}-file={place / f'munge.{name}'}" for name in ("seed", "log")]
    files += [f"--key-file={place / 'key'}", f"--pid-file={place / 'munged.pid'}"]
    try:
        subprocess.run(["munged", "--force", f"--socket={place / 'socket'}", *files], check=True)
        for daemon in (["slurmctld", "-c"], ["slurmd", "-N", "n0"], ["slurmd", "-N", "n1"]):
            subprocess.run(daemon, check=True, env=environment)
        end = time.monotonic() + WAIT_SECONDS
        while (
            "idle 2" not in subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environment, stdout=-1, text=True).stdout
        ):
            assert time.monotonic() < end, (place / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield own
    finally:
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], env=environment, check=False)
        found = [place / f"{name}.pid" for name in names]
        pids = [int(each.read_text()) for each in found if each.exists()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):  # they still write into the folder
            time.sleep(0.1)


def slurm_conf(place: Path) -> str:
    host, ports = socket.gethostname(), [free_port() for _ in range(3)]
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=2" for number in range(2)
    )
    return f"""\
ClusterName=campaign
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[2]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
LaunchParameters=use_interactive_step
{nodes}
PartitionName=main Nodes=n0,n1 Default=YES State=UP
"""


LAUNCHERS: dict[str, tuple[str, Callable[[Path, bool], AbstractContextManager[Run]], dict[str, Stop]]] = {
    "hydra": ("`mpiexec` of Hydra 5.0.2", hydra, SIGNALS),
    "openmpi": ("`mpirun` of Open MPI 4.1.4", open_mpi, {"as it says": advised, **SIGNALS}),
    "torchrun": ("`torchrun` 2.13", torchrun, SIGNALS),
    "slurm": ("`srun` of Slurm 22.05.8", slurm, {"as it says": advised, **SRUN}),
}
COLUMNS = ("ranks", "as it says", *SIGNALS, "a rank is killed")


def examine(
    name: str, folder: Path, install: bool, rows: Sequence[str] = COLUMNS[1:], model: Sequence[str] = Run.model
) -> dict[str, str]:
    """Start a run for each row and end it so; return what came of it. Raises NotHere."""
    _, opened, stops = LAUNCHERS[name]
    found: dict[str, str] = {}
    for number, (row, stop) in enumerate({**stops, "a rank is killed": kill_rank}.items()):
        if row not in rows:
            continue
        own = folder / str(number)
        own.mkdir()
        with opened(own, install) as run:
            run.model = model
            started = run.start()
            found["ranks"] = str(json.loads((run.output / "settings.json").read_text())["num_processes"])
            stop(run, started)
            found[row] = run.ended(started)
            if row == "a rank is killed":
                said = re.findall(r"(rank 0 lost contact to rank 1 .*)", run.said)
                found[row] = ", ".join([found[row].rpartition(" ")[2], *said[:1]])
    return found


def typed(variables: Mapping[str, str], command: Sequence[str], *lines: str) -> str:
    """Type lines into a shell that a command opens in a terminal, each at its prompt; return what is shown."""
    shown, pid, terminal = b"", *pty.fork()
    if not pid:
        os.execvpe(command[0], [*command], {**os.environ, **variables})
    left = [*lines, "exit"]
    with suppress(OSError):  # EIO once the shell has ended
        while part := os.read(terminal, 4096):
            shown += part
            if left and shown.endswith((b"# ", b"$ ")):  # what is typed before is lost while srun connects
                os.write(terminal, f"{left.pop(0)}\n".encode())
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.decode(errors="replace")


def examine_slurm(folder: Path) -> dict[str, str]:
    """Return what the exported script and interactive allocations do."""
    found: dict[str, str] = {}
    job = [*flags(folder), "--num_processes=2", "--num_machines=2"]
    with cluster(folder, install=True) as variables:
        own = {**os.environ, **variables, "PATH": f"{Path(PROGRAM).parent}:{os.environ['PATH']}"}

        def submitted(name: str, *changed: str) -> tuple[Path, subprocess.Popen[str]]:
            script = folder / f"{name}.sbatch"
            subprocess.run(
                [PROGRAM, "config", "export", "--to=slurm", *job, *changed, f"--output={script}"],
                check=True,
                capture_output=True,
            )
            if name == "a wrong setting":
                script.write_text(script.read_text().replace("--train_batch_size=2", "--train_batch_size=none"))
            command = ["sbatch", "--wait", f"--output={folder / name}.log", str(script)]
            return script, subprocess.Popen(command, env=own, text=True, stdout=subprocess.PIPE)

        _, wrong = submitted("a wrong setting")
        found["exported, a wrong setting"] = str(wrong.wait(WAIT_SECONDS))
        with socket.create_server(("0.0.0.0", 0)) as taken:
            _, refused = submitted("port", f"--main_process_port={taken.getsockname()[1]}")
            found["exported, the port is taken"] = str(refused.wait(WAIT_SECONDS))
        run = Run(folder, [])
        _, stopped = submitted("stopped", f"--main_process_port={free_port()}")
        while run.steps() < 2:
            assert stopped.poll() is None, (folder / "stopped.log").read_text()
            time.sleep(0.2)
        assert stopped.stdout is not None
        number = re.findall(r"\d+", stopped.stdout.readline())[0]
        subprocess.run(["scancel", "--signal=TERM", number], env=own, check=True)
        found["exported, scancel --signal=TERM"] = run.ended(stopped)
        check = f"srun --overlap -n2 {PROGRAM} nfs check --path={folder / 'shared'}"
        for row, shell in (("salloc", ["salloc", "-n2"]), ("srun --pty", ["srun", "-n2", "--pty", "bash", "--norc"])):
            shown = typed(variables, shell, check)
            found[f"{row}, nfs check"] = ", ".join(sorted({*re.findall(r"as node \d of \d", shown)}))
    return found


def main(names: list[str]) -> int:
    print(f"| {datetime.now(UTC).date()} | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    failed = 0
    for name in names or LAUNCHERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = examine(name, Path(folder), install=True)
            except (NotHere, AssertionError, subprocess.SubprocessError) as error:
                found, failed = {"ranks": f"failed: {error!r}"}, 1
        print(f"| {LAUNCHERS[name][0]} | {' | '.join(found.get(row, '') for row in COLUMNS)} |", flush=True)
    if "slurm" in (names or LAUNCHERS):
        with tempfile.TemporaryDirectory() as folder:
            for row, answer in examine_slurm(Path(folder)).items():
                print(f"{row}: {answer}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
