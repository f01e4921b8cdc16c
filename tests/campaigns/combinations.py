"""Train random combinations of family, engine and settings, in halves and whole, and compare the losses.

    .venv/bin/python tests/campaigns/combinations.py RESULTS [--count=100] [--seed=0] [--only=K]

Each case trains 4 steps at once, and 2 + 2 in another folder: all losses and the gradients' norms are finite and
equal, or the first start is refused. RESULTS has a JSON line for each case; a
campaign that was stopped goes on there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import ranks  # noqa: E402
from conftest import SMALL, Starter, fork_server_context  # noqa: E402
from results import add_result, read_results  # noqa: E402

FAMILIES = ("sdxl", "sd1x", "sd3", "flux", "flux2", "qwen_image", "z_image", "sana", "auraflow", "chroma", "lumina2")
BY_AUTO = ("ernie", "cogview4", "prx", "sd3", "flux", "krea2", "z_image")
ENGINES = (
    (1,),
    (1,),
    (2,),
    (2, "--fsdp_enable"),
    (2, "--fsdp_enable", "--fsdp_offload_params"),
    (2, "--fsdp_enable", "--fsdp_reshard_after_forward=false"),
    (2, "--fsdp_enable", "--dp_replicate_size=2"),
    (2, "--fsdp_enable", "--context_parallel_size=2"),
    (2, "--zero_stage=1"),
    (2, "--zero_stage=2", "--offload_optimizer=cpu"),
    (2, "--zero_stage=3"),
)
TYPES = (
    (),
    (),
    (),
    (),
    ("--model_type=lora", "--lora_rank=4"),
    ("--model_type=lora", "--lora_rank=4", "--lora_type=dora"),
    ("--model_type=lora", "--lora_type=lokr"),
    ("--model_type=lora", "--lora_type=loha", "--lora_rank=4"),
    ("--model_type=lora", "--lora_type=oft", "--lora_rank=4"),
    ("--model_type=lora", "--lora_rank=4", "--base_model_precision=int8"),
    ("--model_type=lora", "--lora_rank=4", "--base_model_precision=nf4"),
)
EXTRAS = (
    ("--use_ema", "--validation_prompt=a red circle", "--validation_step_interval=2", "--validation_resolution=64"),
    ("--eval_split=0.2", "--eval_step_interval=1"),
    ("--eval_split=0.2", "--eval_step_interval=1", "--early_stopping_patience=3", "--export_best", "--use_ema"),
    ("--gradient_accumulation_steps=2",),
    ("--gradient_checkpointing=true",),
    ("--gradient_checkpointing=true", "--offload_activations"),
    ("--activation_memory_budget=0.5",),
    ("--optimizer=muon",),
    ("--optimizer=adafactor",),
    ("--optimizer=lion",),
    ("--optimizer=prodigy", "--learning_rate=1"),
    ("--optimizer=adamw_schedulefree",),
    ("--state_layout=split", "--mixed_precision=bf16"),
    ("--state_layout=bf16", "--mixed_precision=bf16"),
    ("--mixed_precision=bf16",),
    ("--optimizer_release_gradients", "--max_grad_norm=0"),
    ("--vae_cache_disable",),
    ("--text_cache_disable",),
    ("--vae_cache_ondemand", "--text_cache_ondemand"),
    ("--compress_disk_cache", "--vae_cache_dtype=bf16"),
    ("--crop", "--crop_style=random"),
    ("--log_sample_losses",),
    ("--export_single_file",),
    ("--export_precision=bf16",),
    ("--async_checkpointing=false",),
    ("--fuse_qkv_projections",),
    ("--fuse_qkv_projections",),
    ("--attention_backend=math",),
    ("--grad_clip_method=value",),
    ("--lr_scheduler=constant_with_warmup", "--lr_warmup_steps=2"),
    ("--caption_dropout_probability=0.9",),
    ("--instance_prompt=photo of", "--prepend_instance_prompt"),
    ("--ema_device=accelerator", "--use_ema", "--ema_update_interval=2"),
    ("--train_batch_size=1", "--repeats=1"),
    ("--report_to=tensorboard",),
    ("--checkpoint_step_interval=1", "--checkpoints_total_limit=1"),
)
REFUSED = (2, 3, 4)
"""Exit codes of a start that says what is wrong."""
FAULTS = re.compile(r"this is a bug|Traceback|Warning: ")


def drawn(case: int, seed: int) -> tuple[list[str], int]:
    """Return the flags of a case, and the number of its ranks."""
    choose = random.Random(f"{seed} {case}")
    by_auto = choose.random() < 0.4
    family = choose.choice(BY_AUTO if by_auto else FAMILIES)
    world, *engine = choose.choice(ENGINES)
    extras = choose.sample(EXTRAS, choose.randint(2, 5))
    named = ["--model_family=auto"] if by_auto else [f"--model_family={family}"]
    # What these refuse is tested elsewhere.
    by_zero = any("zero" in flag for flag in engine)
    kind = () if by_zero else choose.choice(TYPES)
    if kind or by_zero:
        extras = [
            each for each in extras if not each[0].startswith(("--state_layout", "--optimizer_release", "--fuse_qkv"))
        ]
    return [family, *named, *engine, *kind, *(flag for extra in extras for flag in extra)], world


def base_flags(base: Path, pictures: Path) -> tuple[str, ...]:
    places = (f"--pretrained_model_name_or_path={base}", f"--instance_data_dir={pictures}")
    caches = (f"--cache_dir_{kind}={base.parent / kind / base.name}" for kind in ("vae", "text"))
    return (
        *SMALL,
        "--aspect_bucket_alignment=32",
        "--train_batch_size=2",
        "--tokenizer_max_length=24",
        *caches,
        *places,
    )


def rows_of(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def fault_of(starter: Starter, folder: Path, flags: list[str], world: int) -> tuple[str, str]:
    """Return what is wrong with a case, and how it ended."""

    def start(name: str, steps: int) -> tuple[set[int], str]:
        run = starter.train(world, f"--output_dir={folder / name}", *flags, f"--max_train_steps={steps}")
        return set(run.wait(600)), run.said

    for name, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        codes, said = start(name, steps)
        if FAULTS.search(said) or not codes <= {0, *REFUSED}:
            return said, "fault"
        if codes != {0}:
            sentence = "refused: " + "".join(re.findall("error: (.*)", said)[:1])
            return ("" if name == "whole" else said), sentence
    whole, halves = rows_of(folder / "whole"), rows_of(folder / "halves")
    for name in ("step", "loss", "grad_norm", "lr"):
        pairs = [(one.get(name), other.get(name)) for one, other in zip(whole, halves, strict=False)]
        if len(whole) != len(halves) or not all(
            one == other or math.isclose(one, other, rel_tol=1e-5) for one, other in pairs
        ):
            return f"{name}: {pairs}\n{said}", "fault: 2 + 2 are not 4"
    return "", "trained"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    done = {row["case"] for row in read_results(given.results) if row["seed"] == given.seed}
    cases = [given.only] if given.only is not None else [each for each in range(given.count) if each not in done]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder, starter = Path(name), Starter(fork_server_context(), Path(name))
        draw = [sys.executable, str(ROOT / "examples" / "shapes" / "draw.py"), "--count", "24"]
        subprocess.run([*draw, str(folder / "shapes0")], check=True, capture_output=True)
        for case in cases:
            (family, *flags), world = drawn(case, given.seed)
            base = folder / "base" / family
            if not base.exists():
                builder = starter.context.Process(target=ranks.build_pipeline, args=(family, str(base)))
                builder.start()
                builder.join()
            fault, end = fault_of(
                starter, folder / f"case{case}", [*base_flags(base, folder / "shapes0"), *flags], world
            )
            failed += bool(fault)
            row = {"seed": given.seed, "case": case, "family": family, "ranks": world, "flags": flags, "end": end}
            add_result(given.results, {**row, "fault": fault})
            print(f"{case:4} {family} x {world} {' '.join(flags)}\n     {end}", flush=True)
            if fault and given.only is not None:
                print(fault)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
