"""`simpletuner train` with tiny models, in each way that has code of its own on a GPU, a dozen runs at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from gpu.records import Record, farthest, last_words, tell
from gpu.steps import FSDP, LORA, Flags

DRAW = Path(__file__).parents[2] / "examples" / "shapes" / "draw.py"
TINY: Flags = {
    "model_flavour": "tiny",
    "resolution": 64,
    "resolution_type": "pixel",
    "tokenizer_max_length": 16,
    "aspect_bucket_alignment": 32,
    "train_batch_size": 4,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "seed": 7,
    "gradient_checkpointing": False,
    "checkpoint_step_interval": 5,
    "max_train_steps": 6,
    "dynamo_backend": "no",
}
IMAGES: Flags = {
    "validation_prompt": "a red circle",
    "validation_step_interval": 5,
    "validation_num_inference_steps": 4,
}
FP32: Flags = {"mixed_precision": "no"}
SPLIT: Flags = {"state_layout": "split"}
COMPILED: Flags = {"dynamo_backend": "inductor"}
ZERO_3_CPU: Flags = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
CPU, CPU_LORA = "cpu fp32", "cpu lora"

FLUX: dict[str, tuple[Flags, float]] = {
    CPU: (FP32 | {"use_cpu": True}, 0),
    CPU_LORA: (FP32 | LORA | {"use_cpu": True}, 0),
    "fp32": (FP32, 1e-3),
    "bf16": ({}, 0.03),
    "split": (SPLIT, 0.03),
    "released": ({"state_layout": "bf16", "optimizer_release_gradients": True, "max_grad_norm": 0}, 0.2),
    "ema on the cpu": (FP32 | IMAGES | {"use_ema": True, "ema_validation": "comparison"}, 1e-3),
    "ema on the gpu": (FP32 | {"use_ema": True, "ema_device": "accelerator"}, 1e-3),
    "fsdp2": (FP32 | FSDP, 1e-3),
    "fsdp2 bf16 ema": (FSDP | {"use_ema": True}, 0.03),
    "fsdp2 split": (FSDP | SPLIT, 0.03),
    "fsdp2 streamed": (FP32 | FSDP | {"fsdp_offload_params": True}, 1e-3),
    "fsdp2 full file": (FP32 | FSDP | {"fsdp_state_dict_type": "FULL_STATE_DICT"}, 1e-3),
    "recomputed, offloaded": ({"gradient_checkpointing": True, "offload_activations": True}, 0.03),
    "offloaded activations": ({"offload_activations": True}, 0.03),
    "auto recompute": ({"gradient_checkpointing": "auto"}, 0.03),
    "compiled": (COMPILED, 0.03),
    "compiled split, budget": (COMPILED | SPLIT | {"activation_memory_budget": 0.5}, 0.03),
    "compiled fsdp2": (FSDP | COMPILED, 0.03),
    "lora": (LORA | IMAGES, 0.02),
    "lora int8": (LORA | {"base_model_precision": "int8"}, 0.02),
    "lora int8 products": (LORA | {"base_model_precision": "int8", "base_model_compute": "int8"}, 0.02),
    "lora nf4": (LORA | {"base_model_precision": "nf4"}, 0.05),
    "lora float8": (LORA | {"base_model_precision": "float8"}, 0.03),
    "lora fsdp2 streamed": (LORA | FSDP | {"fsdp_offload_params": True}, 0.02),
    "float8": (COMPILED | {"float8": True}, 0.1),
    "encoded on demand": (FP32 | {"vae_cache_disable": True, "text_cache_disable": True}, 0.03),
    "evaluated": (FP32 | {"eval_split": 0.1, "eval_step_interval": 3}, 0.5),
    "profiled": ({"profile_steps": "3:4"}, 0.03),
    "muon": ({"optimizer": "muon"}, 0.03),
    "adafactor": ({"optimizer": "adafactor"}, 0.03),
    "schedule-free": ({"optimizer": "adamw_schedulefree"}, 0.03),
    "prodigy": ({"optimizer": "prodigy"}, 0.03),
    "lion": ({"optimizer": "lion"}, 0.03),
    "attention cudnn": ({"attention_backend": "cudnn"}, 0.03),
    "zero 1": (FP32 | {"zero_stage": 1}, 1e-2),
    "zero 2": (FP32 | {"zero_stage": 2}, 1e-2),
    "zero 2 cpu": ({"zero_stage": 2, "offload_optimizer": "cpu"}, 0.03),
    "zero 3": (FP32 | {"zero_stage": 3}, 1e-2),
    "zero 3 cpu": (FP32 | ZERO_3_CPU, 1e-2),
}
"""Settings, and how far losses may be from those of float32 on the CPU, from the same cached latents."""
OTHER_UPDATES = {"muon", "adafactor", "schedule-free", "prodigy", "lion"}
"""Those of which the first loss alone is the reference's."""
SDXL = {
    name: FLUX[name] for name in (CPU, CPU_LORA, "fp32", "bf16", "split", "fsdp2", "compiled", "lora", "zero 2 cpu")
}
TWO_DENOISERS: dict[str, tuple[Flags, float]] = {
    "two denoisers": (
        IMAGES | {"model_flavour": "t2v-14b-2.2-high", "pretrained_model_name_or_path": "two-denoisers"},
        0,
    )
}
"""As of Wan 2.2: the one that is not trained is copied to the GPU block by block, on a stream of its own."""
RESUMED = {"fp32", "split", "fsdp2", "fsdp2 split", "lora", "zero 2 cpu"}
"""Those that are killed in their ninth step or later and started again; a checkpoint is there of every fifth."""
AT_ONCE = 12
"""Runs beside each other: a process takes 2 to 3 GiB of the machine's memory."""


@dataclass
class TinyRun:
    """A run in a folder. `phase` says what a start is: "" for the only one, killed, or resumed."""

    folder: Path
    family: str
    name: str
    flags: Flags
    tiny: bool
    phase: str = ""
    began: float = 0.0
    before: list[float] = field(default_factory=list)
    """Losses of the steps before SIGKILL."""

    @property
    def label(self) -> str:
        return f"{self.family}, {self.name}"

    @property
    def output(self) -> Path:
        return self.folder / self.label.replace(",", "").replace(" ", "-")

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def start(self, **more: object) -> subprocess.Popen[bytes]:
        paths: Flags = {"instance_data_dir": self.folder / "images", "output_dir": self.output}
        caches: Flags = {f"cache_dir_{kind}": self.folder / f"{kind}-{self.family}" for kind in ("vae", "text")}
        flags = (
            TINY
            | {"model_family": self.family}
            | paths
            | caches
            | self.flags
            | ({"use_cpu": True} if self.tiny else {})
        )
        words = [
            f"--{key}={str(each).lower() if isinstance(each, bool) else each}" for key, each in (flags | more).items()
        ]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        self.began = time.monotonic()
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "simpletuner", "train", *words]
            return subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | threads, cwd=self.folder
            )

    def rows(self) -> list[Record]:
        """The rows of metrics.jsonl by step, of a step taken twice the later one."""
        file = self.output / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return list({row["step"]: row for row in found if "loss" in row}.values())

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows()]

    def told(self, code: int | str, tolerance: float, reference: list[float]) -> None:
        rows, losses = self.rows(), self.losses()
        found: Record = {"run": self.label, "seconds": time.monotonic() - self.began, "rc": code, "losses": losses[:12]}
        if self.phase:
            found["phase"] = self.phase
        if code not in (0, -signal.SIGKILL):
            said = self.log.read_text(errors="replace")
            found["error"] = last_words(said)
            print(f"---- {self.label}", said[-4000:], sep="\n", file=sys.stderr)  # into parts.log, which comes back
        if rows:
            found["s/step"] = median(row["seconds"] for row in rows[1:] or rows)
        if reference and tolerance and losses:
            off = farthest(losses[: 1 if self.name in OTHER_UPDATES else None], reference)
            found |= {"off": off, "ok": code == 0 and off <= tolerance}
        if images := len(list((self.output / "validation").glob("step-*/*.png"))):
            found["images"] = images
        if self.phase == "resumed":
            found["after SIGKILL, off"] = farthest(losses[: len(self.before)], self.before)
        tell(**found)


def smoke(tiny: bool) -> None:
    """Train once each: encoders, caches, steps, checkpoint, validation images, pipeline; `matrix` takes its caches."""
    with pictures(tiny) as folder:
        # Nine steps: after five the run looks which weights had no gradient.
        flags = IMAGES | {"max_train_steps": 9}
        runs = [TinyRun(folder, family, "smoke", flags, tiny) for family in ("flux", "sdxl", "wan")]
        run_all(runs, {}, 1 if tiny else len(runs))


def matrix(tiny: bool) -> None:
    """Train in every way that has code of its own on CUDA, beside float32 on the CPU."""
    families = {"flux": FLUX, "sdxl": SDXL, "wan": TWO_DENOISERS}
    if tiny:  # what a CPU can show of it in seconds
        families = {"flux": {name: FLUX[name] for name in (CPU, "split")}}
    with pictures(tiny) as folder:
        if "wan" in families:
            write_two_denoisers(folder / "two-denoisers")
        runs = [
            TinyRun(folder, family, name, flags, tiny, "killed" if name in RESUMED else "")
            for family, own in families.items()
            for name, (flags, _) in own.items()
        ]
        runs.sort(key=lambda run: run.name not in (CPU, CPU_LORA))  # others are held against them
        tolerances = {f"{family}, {name}": each for family, own in families.items() for name, (_, each) in own.items()}
        run_all(runs, tolerances, max(1, min(AT_ONCE, (os.cpu_count() or 2) - 2)))


def write_two_denoisers(folder: Path) -> None:
    """Write a tiny pipeline with a second denoiser, of other weights, below a boundary."""
    import torch
    from diffusers import WanPipeline

    from simpletuner.models.catalog.registry import load_preset
    from simpletuner.models.tiny.build import build_preset

    preset = load_preset("wan")
    assert preset is not None and preset.tiny is not None
    torch.manual_seed(1)
    second = build_preset(preset.tiny).transformer
    build_preset(preset.tiny).save_pretrained(folder)
    WanPipeline.from_pretrained(folder, transformer_2=second, boundary_ratio=0.875).save_pretrained(folder)


@contextmanager
def pictures(tiny: bool) -> Iterator[Path]:
    """Yield a folder with drawn images: one for all parts, or, for tiny models, one that goes."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-")) if tiny else Path(tempfile.gettempdir()) / "gpu-check-runs"
    folder.mkdir(exist_ok=True)
    if not (folder / "images").exists():
        draw = [sys.executable, str(DRAW), str(folder / "images"), "--count", "48"]
        subprocess.run(draw, check=True, capture_output=True)
    try:
        yield folder
    finally:
        if tiny:
            shutil.rmtree(folder)


def run_all(waiting: list[TinyRun], tolerances: dict[str, float], most: int) -> None:
    """Run all, so many at once; kill and start again those that are to be killed, and tell how each ended."""
    references: dict[str, TinyRun] = {run.label: run for run in waiting if run.name in (CPU, CPU_LORA)}
    running: list[tuple[TinyRun, subprocess.Popen[bytes]]] = []

    def ended(run: TinyRun, code: int | str) -> None:
        reference = references.get(f"{run.family}, {CPU_LORA if run.name.startswith('lora') else CPU}")
        run.told(code, tolerances.get(run.label, 0), reference.losses() if reference else [])

    try:
        while waiting or running:
            while waiting and len(running) < most:
                run = waiting.pop(0)
                running.append((run, run.start(**({"max_train_steps": 100_000} if run.phase else {}))))
            for run, process in [*running]:
                if process.poll() is not None:
                    running.remove((run, process))
                    ended(run, process.returncode)
                elif run.phase == "killed" and len(run.rows()) >= 9:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    running.remove((run, process))
                    run.phase, run.before = "resumed", run.losses()
                    running.append((run, run.start(max_train_steps=len(run.before) + 2)))
            time.sleep(0.1)
    finally:
        for run, process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ended(run, "still running")
