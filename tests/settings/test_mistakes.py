"""What a user reads after a mistake: every answer, in full, in mistakes.txt.

Regenerate it with `python tests/settings/test_mistakes.py`, and read the difference as a user would.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.errors import BrokenRule, Mistake, SettingsError
from simpletuner.settings import load

GOLDEN = Path(__file__).with_name("mistakes.txt")
ENOUGH = "--model_family=sdxl --instance_data_dir=pictures"


@dataclass(frozen=True)
class Case:
    """A command line, the files and the environment that it finds, all in a folder of its own."""

    command: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def file(name: str, text: str | bytes, command: str = f"train {ENOUGH} --config={{}}") -> Case:
    """Return the case of one config file."""
    return Case(command.format(name), {name: text})


CASES: tuple[Case, ...] = (
    Case("trian"),
    Case("config exprot"),
    Case("check"),
    Case("--config run.toml train"),
    Case("train run.toml", {"run.toml": "model_family = 'sdxl'\n"}),
    Case(f"train {ENOUGH} a.png", {"a.png": b""}),
    Case("train rnu.TOML", {"run.toml": "model_family = 'sdxl'\n"}),
    Case("config export --to=ini"),
    Case("config export"),
    Case("config init"),
    Case("config init --model_famly=sdxl"),
    Case("config init --model_family=sdlx"),
    Case("config init --model_family=sdxl --num_processes=0"),
    Case("cache list --data_backend_config=no.json"),
    Case("config init --model_family=sdxl", {"config/config.toml": "seed = 1\n"}),
    Case("config validate"),
    Case("config validate", {"config/config.toml": "model_family = 'sdxl'\nsed = 1\n"}),
    Case("config validate no.toml"),
    Case("config export --to=deepspeed"),
    Case("config export --to=json --output=a/b.json", {"a": "a file, not a folder"}),
    Case("train"),
    Case(f"train {ENOUGH} --lerning_rate=1e-4"),
    Case(f"train {ENOUGH} --lerning_rate 1e-4 stray"),
    Case(f"train {ENOUGH} --lr=1e-4 --batch_size=2"),
    Case("cache list --path output"),
    Case("cache list output", {"output/log.txt": ""}),
    Case(f"train {ENOUGH} --train_batch_size"),
    Case(f"train {ENOUGH} --train_batch_size=many --ema_decay=1 --lr_scheduler=cosin --crop=perhaps --sed=1"),
    Case(f"train {ENOUGH} --mixed_precision=fp16"),
    Case("train --model_family=sdlx --instance_data_dir=pictures"),
    Case("train --model_family=flux --model_flavour=schnel --instance_data_dir=pictures"),
    Case(f"train {ENOUGH} --config=no.toml"),
    Case(f"train {ENOUGH} --config=config", {"config/other.txt": ""}),
    Case(f"train {ENOUGH} --config=config.ini", {"config.ini": "seed=1"}),
    file("latin.toml", "instance_prompt = 'Bär'".encode("latin-1")),
    file("c.json", '{"seed": 1,}'),
    file("c.json", '{\n  "--seed": 1,\n  "--sed": 2,\n  "--seed": "x"\n}'),
    file("c.json", "[1, 2]"),
    file("c.json", '{"deepspeed_config": {"a": NaN}, "validation_prompt": ["a", 3], "instance_prompt": ["x"]}'),
    file("c.toml", "seed = 1\nmixed_precision = fp32\n"),
    file("c.toml", 'seed = 1\nseed = 2\ncrop = "x"\n'),
    file("c.toml", "[training]\nseed = 1\n"),
    file("c.toml", "output_dir = 2024\nrevision = 1.10\nmain_process_port = 70000\n"),
    file("c.yaml", "seed: 1\ncrop: [1\nrepeats: 2\n"),
    file("c.yaml", "seed: -1\nmixed-precision: fp8\nresolution:\ninstance_prompt: 2020-01-01\n"),
    Case(f"train {ENOUGH} --mixed_precision=fp16 --fp8_base"),
    file("c.yaml", "just words"),
    Case(f"train {ENOUGH}", {"config/config.env": "TRAIN_BATCH_SIZE=4\nSEED=$RANDOM\n"}),
    Case(f"train {ENOUGH}", {"config/config.env": "OUTPUT_DIR=$SCRATCH/out\n"}),
    Case(f"train {ENOUGH}", {"config/config.env": "SEED=1\nOUTPUT_DIR=out-$(date +%F)\n"}),
    Case(f"train {ENOUGH}", {"config/config.env": "MODEL_TYPE=full\nTRAINER_EXTRA_ARGS='--use-emma --seed -1'\n"}),
    Case(f"train {ENOUGH} --output_dir={{env:SCRATCH}}/out"),
    Case(
        f"train {ENOUGH}", {"config/config.env": "# mine\nexport SIMPLETUNER_SEED='x'\nLERNING_RATE=1\nENV=default\n"}
    ),
    Case(f"train {ENOUGH}", environment={"SIMPLETUNER_SEED": "x", "SIMPLETUNER_TRAIN_BATCH_SISE": "4"}),
    Case(f"train {ENOUGH}", environment={"SIMPLETUNER_CONFIG": "no.json"}),
    Case(f"train {ENOUGH} --accelerate_config=no.yaml"),
    Case(f"train {ENOUGH}", {"a.yaml": "seed: 1\n"}, {"ACCELERATE_CONFIG_FILE": "a.yaml"}),
    Case(
        f"train {ENOUGH} --accelerate_config=a.yaml",
        {"a.yaml": "distributed_type: FSDP\nmixed_precision: fp8\nfsdp_config:\n  fsdp_version: 3\ntpu_name: x\n"},
    ),
    file("c.yaml", "checkpointing_steps: 5\ncheckpoint_step_interval: 6\n"),
    file("c.toml", "num_processes = 8\nnum_machines = 3\n", f"train {ENOUGH} --main_process_ip=10.0.0.1 --config={{}}"),
    file("c.toml", 'instance_prompt = """a\n'),
    Case(f"train {ENOUGH} --deepspeed_config=no.json"),
    Case(f"train {ENOUGH} --deepspeed_config=ds.json", {"ds.json": '{"zero_optimization": {'}),
    Case(f"train {ENOUGH} --fsdp_enable --zero_stage=2"),
    Case(f"train {ENOUGH} --fsdp_enable --fsdp_version=1 --context_parallel_size=2 --num_processes=2"),
    Case(f"train {ENOUGH} --fsdp_enable --context_parallel_size=3 --num_processes=8"),
    Case(f"train {ENOUGH} --num_machines=3 --num_processes=8 --machine_rank=3"),
    Case(f"train {ENOUGH} --num_machines=2 --num_processes=16"),
    Case(f"train {ENOUGH} --fsdp_auto_wrap_policy=BLOCKS --validation_resolution=big"),
    Case(f"train {ENOUGH} --fsdp_enable --fsdp_auto_wrap_policy=tranformer_wrap"),
    Case(f"train {ENOUGH} --optimizer=adamw8bit"),
    Case(f"train {ENOUGH} --deepspeed_config=ds.json", {"ds.json": '{"zero_optimization.stage": 2}'}),
    Case("train --model_family=cosmos3 --instance_data_dir=pictures"),
    Case("train --model_family=cosmos2image --instance_data_dir=pictures"),
    file("c.json", '{"lora_type": "lycoris", "lycoris_config": "l.json", "seed": 1}'),
    file("c.json", '{"_metadata": {}, "config": {"--seed": 1}}'),
    file("c.toml", 'network_module = "networks.lora"\n'),
    file(".envrc", "source .venv/bin/activate\nSEED=1\n"),
    Case(f"train {ENOUGH} --lr_warmup_steps=20 --max_train_steps=10"),
    Case(f"train {ENOUGH} --profile_steps=8:12 --max_train_steps=10"),
    Case(
        f"train {ENOUGH} --model_type=lora --export_format=foo --assistant_lora=no --lora_init=none/such "
        "--aspect_bucket_alignment=12 --validation_resolution=100"
    ),
    Case(f"train {ENOUGH} --profile_steps=12 --device_peak_tflops=0"),
    Case(f"train {ENOUGH} --profile_steps=12:8"),
    Case(f"train {ENOUGH} --profile_steps=1:500"),
    Case(f"train {ENOUGH} --data_backend_config=b.json --caption_strategy=instanceprompt"),
)


def zero(text: str, flags: str = "") -> Case:
    """Return the case of one DeepSpeed JSON."""
    return Case(f"train {ENOUGH} --deepspeed_config=ds.json{flags and ' '}{flags}", {"ds.json": text})


ZERO = '"zero_optimization": {"stage": 2}'
CASES += (
    zero("{}"),
    zero('{"zero_optimization": {"stage": 0}}'),
    zero('{"zero_optimization": {"stage": 4}}'),
    zero('{"zero_optimisation": {"stage": 2}}'),
    zero('{"zero_optimization": {"stage": 2, "stage": 3}}'),
    zero(
        '{"zero_optimization": {"stage": 2, "reduce_buket_size": 5e8, "overlap_comm": "yes"}, "steps_per_print": 0.5}'
    ),
    zero('{"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}}'),
    zero(
        '{"zero_optimization": [3], "optimizer": "AdamW", "scheduler": {"type": "WarmUpLR", "params": {"warmup": 1}}}'
    ),
    zero("{" + ZERO + ', "gradient_accumulation_steps": 4}', "--gradient_accumulation_steps=2"),
    zero("{" + ZERO + ', "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}', "--num_processes=3"),
    zero(
        "{" + ZERO + ', "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}'
    ),
    zero('{"zero_optimization": {"stage": true}, "zero_optimization.stage": 2, "bf16": {"loss_scale": NaN}}'),
    zero('{"zero_optimization": {"stage": true}, "zero_optimization.stage": 2, "bf16": {"loss_scale": 0}}'),
    zero("null"),
    file("c.yaml", "zero_stage: true"),
    zero("{" + ZERO + ', "fp16": {"enabled": true}, "amp": {"enabled": true}, "fp8": {}, "gradient_clipping": -1}'),
    zero("{" + ZERO + ', "optimizer": {"type": "AdmaW", "params": {"lr": 1e-4}}}'),
    zero("{" + ZERO + ', "optimizer": {"type": "MuSGD"}, "scheduler": {"type": "LRRangeTest"}}'),
    zero("{" + ZERO + ', "optimizer": {"type": "Lion", "params": {"eps": 1e-8, "betas": 0.9, "lr": "high"}}}'),
    zero(
        "{" + ZERO + ', "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}', "--learning_rate=1e-4"
    ),
    Case(f'train {ENOUGH} --deepspeed_config=\'{{"zero_optimization": {{"stage": 2, "offload_param": 1}}}}\''),
    Case(f"train {ENOUGH} --zero_stage=2 --offload_param=cpu"),
    Case(f"train {ENOUGH} --zero_stage=3 --offload_param=nvme"),
    Case(f"train {ENOUGH} --offload_optimizer=disk --zero_stage=0"),
    Case(f"train {ENOUGH} --model_type=lora --zero_stage=2"),
    Case(f"train {ENOUGH} --model_type=lora --lora_type=dora --base_model_precision=int8 --lokr_factor=4"),
    Case(f"train {ENOUGH} --model_type=lora --lora_type=oft --lora_alpha=4 --lora_dropout=0.1 --export_format=kohya"),
    Case(f"train {ENOUGH} --model_type=lora --export_format=diffusers,a1111"),
    Case("train --model_family=sana --instance_data_dir=pictures --model_type=lora --export_format=comfyui"),
    Case(
        f"train {ENOUGH} --accelerate_config=a.yaml",
        {"a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_param_device: cpu\n"},
    ),
)


def answer(case: Case) -> tuple[str, str, int]:
    """Return what a command writes to stdout and stderr, and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(case.command))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return out.getvalue(), err.getvalue(), code


@contextlib.contextmanager
def place_of(case: Case) -> Iterator[None]:
    """Make a case's files and environment, and stand among them."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in case.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        os.environ.update({"HOME": folder, "COLUMNS": "100"} | dict(case.environment))
        for name in ("SIMPLETUNER_ACCELERATE_CONFIG", "HF_HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def render(case: Case) -> str:
    """Return a case as a session in a terminal."""
    with place_of(case):
        out, err, code = answer(case)
    assert "Traceback" not in err
    assert out == "", "a mistake leaves stdout empty"
    files = "".join(f"--- {name}\n{shown(text)}" for name, text in case.files.items())
    variables = "".join(f"{name}={value} " for name, value in case.environment.items())
    return f"{files}$ {variables}simpletuner {case.command}\n{err}exit {code}\n"


def shown(text: str | bytes) -> str:
    """Return the lines of a file, so that none looks like an answer."""
    return "".join(f"    {line}\n" for line in (text if isinstance(text, str) else repr(text)).splitlines())


def render_all() -> str:
    return "\n".join(map(render, CASES))


def test_every_mistake_gets_the_reviewed_answer():
    assert render_all() == GOLDEN.read_text(encoding="utf-8")


def test_mistakes_are_values_that_a_page_can_put_beside_their_fields():
    with pytest.raises(SettingsError) as caught:
        load({"mixed_precision": "bf61", "lr_warmup_steps": 2, "max_train_steps": 1}, complete=False, environment={})
    mistake, broken = caught.value.mistakes
    assert mistake == Mistake("mixed_precision", "use one of no, bf16", "flag", "'bf61'", "did you mean `bf16`?")
    assert isinstance(broken, BrokenRule)
    assert (broken.setting, broken.others) == ("lr_warmup_steps", ("max_train_steps",))
    assert caught.value.message == f"{mistake}\n  {broken.message}"


if __name__ == "__main__":
    GOLDEN.write_text(render_all(), encoding="utf-8")
