"""How `gpu.py` measures a case, in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from gpu_cases import MIB, Case, Flags, Record

from simpletuner.counting.step_memory import Workload
from simpletuner.data.prefetch import Batch, StepBatch
from simpletuner.data.sampler.batch_sampler import SamplerState
from simpletuner.errors import SimpleTunerError
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.report import Report
from simpletuner.run_log import silence_torchao
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.plan.estimate import opened_family
from simpletuner.tools.plan.measure import fill_with_noise, random_engine, random_inputs, timed_steps
from simpletuner.training.checkpointer import Checkpointer
from simpletuner.training.metrics.speed import Durations
from simpletuner.training.optimizers import LearningRate, Schedule
from simpletuner.training.step_logger import StepLogger, StopVote
from simpletuner.training.trainer import Trainer

WARM_UP, STEPS = 2, 4
DRAW = Path(__file__).parents[1] / "examples" / "shapes" / "draw.py"
RUN: Flags = {
    "train_batch_size": 4,
    "learning_rate": 1e-3,
    "seed": 7,
    "aspect_bucket_alignment": 32,
    "gradient_checkpointing": False,
    "checkpoint_step_interval": 5,
    "validation_prompt": "a red circle",
    "validation_step_interval": 5,
    "validation_num_inference_steps": 4,
}


def seconds_of(call: Callable[[], object], at_least: float = 0.5) -> float:
    """Return the median time of a call, which is made for so many seconds."""
    taken: list[float] = []
    call()
    end = time.perf_counter() + at_least
    while len(taken) < 3 or time.perf_counter() < end:
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_mib() -> int:
    """Return what nvidia-smi shows of the GPU, other processes included; 0 without it."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def measure_machine(case: Case) -> Record:
    edge, size, seconds = (case.flags[name] for name in ("edge", "bytes", "seconds"))
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    before = used_mib()
    torch.zeros(1, device=device)
    found: Record = {"context, MiB": used_mib() - before}
    left, right = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * edge**3 / 1e12
    found["bf16 product, TFLOP/s"] = flops / seconds_of(lambda: left @ right, min(1, seconds))
    found["for 25 s, TFLOP/s"] = flops / seconds_of(lambda: left @ right, seconds)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy, TB/s"] = 2 * size / seconds_of(lambda: target.copy_(source)) / 1e12
    for name, pinned in (("pinned", on_gpu), ("pageable", False)):
        host = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=pinned)
        there, part = host.numel() / 1e9, source[: host.numel()]
        found[f"{name} to device, GB/s"] = there / seconds_of(lambda: part.copy_(host, non_blocking=True))  # noqa: B023
        found[f"device to {name}, GB/s"] = there / seconds_of(lambda: host.copy_(part, non_blocking=True))  # noqa: B023
    return found


def measure_attention(case: Case) -> Record:
    on_gpu = torch.cuda.is_available() and not case.flags["use_cpu"]
    device = torch.device("cuda" if on_gpu else "cpu")
    samples, heads, tokens, width = case.flags["shape"]
    # As diffusers' processors give them: transposed views of (samples, tokens, heads, width).
    leaves = [
        torch.randn(samples, tokens, heads, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
    flops = 4 * samples * heads * tokens**2 * width / 1e12
    with attention_by(case.flags["attention_backend"], device, torch.bfloat16):
        forward = seconds_of(lambda: F.scaled_dot_product_attention(query, key, value))
        output = F.scaled_dot_product_attention(query, key, value)
        gradient = torch.randn_like(output)
        backward = seconds_of(lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True))
    return {"forward, TFLOP/s": flops / forward, "backward, TFLOP/s": 2.5 * flops / backward}


def find_waits(case: Case) -> Record:
    """Count the waits for the device in two steps of the training loop, by line of code.

    One of each step is known: the logger reads the numbers of the step before.
    """
    settings = case.settings
    with opened_family(settings, Report(quiet=True)) as family, random_engine(settings, family) as (engine, world):
        on_gpu, stop = world.device.type == "cuda", StopRequest()
        vote = StopVote(stop)
        inputs = random_inputs(settings, Workload(family, SampleShape(case.shape)), torch.device("cpu"))
        latents = inputs.pop("latents")
        samples = len(latents)
        micro_batch = Batch(latents, torch.randn_like(latents), torch.full((samples,), 0.5), inputs, ("",) * samples)
        data = StepBatch([micro_batch.pinned() if on_gpu else micro_batch], SamplerState(0, 0, samples, {}))
        trainer = Trainer(
            engine=engine, family=family, objective=family.objective(), batches=iter(()), ema=None, evaluations=(),
            learning_rate=LearningRate(Schedule(100), settings.optimizer), checkpointer=cast(Checkpointer, None),
            logger=StepLogger(Mesh(world), vote, None, None, samples), stop_vote=vote, device=world.device,
            activity=world.activity, stop=stop, report=Report(quiet=True), step=0, max_steps=100, checkpoint_every=100,
            max_grad_norm=1.0, dtype=torch.bfloat16, dropout_seed=0, profiler=None, durations=Durations(),
        )  # fmt: skip
        for number in range(1, WARM_UP + 1):
            trainer.logger.log(number, trainer.train_step(data), data, 0.0)
        with waits_recorded(on_gpu) as places:
            for number in range(WARM_UP + 1, WARM_UP + 3):
                trainer.logger.log(number, trainer.train_step(data), data, 0.0)
    return dict(places) if on_gpu else {"a CPU waits for nothing": True}


@contextmanager
def waits_recorded(on_gpu: bool) -> Iterator[Counter[str]]:
    places: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            own = [each for each in traceback.extract_stack() if "simpletuner" in Path(each.filename).parts]
            places[f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line}" if own else "elsewhere"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        yield places
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def fill_by_name(tensors: NamedTensors) -> None:
    """Give all engines and devices the same weights."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            generator, local = torch.Generator().manual_seed(zlib.crc32(name.encode())), local_tensor(tensor)
            local.copy_(torch.randn(local.shape, generator=generator) * 0.02)


def measure_steps(case: Case) -> Record:
    settings, on_gpu = case.settings, torch.cuda.is_available() and not case.flags.get("use_cpu", False)
    if on_gpu:
        limit_memory(case.limit_mib)
    torch.manual_seed(0)  # the inputs are drawn on the CPU, so that they are equal on all devices
    fill = fill_by_name if case.part == "engines" else fill_with_noise
    with (
        opened_family(settings, Report(quiet=True)) as family,
        random_engine(settings, family, fill) as (engine, world),
    ):
        inputs = random_inputs(settings, Workload(family, SampleShape(case.shape)), world.device)
        steps = list(timed_steps(settings, family, engine, inputs, WARM_UP))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()  # after weights and moments were made
        steps += timed_steps(settings, family, engine, inputs, 2 if case.flags["model_flavour"] == "tiny" else STEPS)
        seconds, norms = zip(*steps, strict=True)
        found: Record = {"s/step": median(seconds[WARM_UP:]), "first step, s": seconds[0], "norms": norms}
        if on_gpu:
            found |= {"peak, MiB": torch.cuda.max_memory_allocated() / MIB, "nvidia-smi, MiB": used_mib()}
            found["reserved, MiB"] = torch.cuda.max_memory_reserved() / MIB
    return found


def measure_run(case: Case) -> Record:
    """Run the command line twice: for five steps, and again, which resumes, for ten."""
    with tempfile.TemporaryDirectory() as name:
        output, images = Path(name) / "output", Path(name) / "images"
        subprocess.run([sys.executable, str(DRAW), str(images)], check=True, capture_output=True)
        flags = RUN | case.flags | {"instance_data_dir": str(images), "output_dir": str(output)}
        for steps in (5, 10):
            words = [
                f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in flags.items()
            ]
            command = [sys.executable, "-m", "simpletuner", "train", *words, f"--max_train_steps={steps}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                return {"error": f"exit code {done.returncode}: {' '.join(done.stdout.split()[-40:])}"}
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        sampled = len(list((output / "validation").glob("step-*/*.png")))
    steps = [row for row in rows if "loss" in row]
    return {
        "s/step": median(row["seconds"] for row in steps),
        "norms": [row["grad_norm"] for row in steps],
        "losses": [row["loss"] for row in steps],
        "images": sampled,
    }


def limit_memory(limit_mib: int) -> None:
    """Let torch allocate what the context leaves of the limit; more raises OutOfMemoryError. 0: no limit."""
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    context = total - free
    if limit_mib:
        torch.cuda.set_per_process_memory_fraction(max(0, limit_mib * MIB - context) / total)


RUNNERS: dict[str, Callable[[Case], Record]] = {
    "syncs": find_waits,
    "ceilings": measure_machine,
    "attention": measure_attention,
    "engines": measure_steps,
    "runs": measure_run,
    "levers": measure_steps,
    "batches": measure_steps,
    "sdxl": measure_steps,
}


def measure(case: Case, answer: Connection) -> None:
    """Send what a case measured, or why it could not; in a process of its own."""
    silence_torchao()
    try:
        answer.send(RUNNERS[case.part](case))
    except (SimpleTunerError, RuntimeError) as error:  # out of memory, or a kernel or compiler that is not there
        answer.send({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"})
