"""`simpletuner plan`: what it counts, beside what torch saves and engines hold; what it proposes; its command line."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers  # noqa: F401  plan leaves packages out of a process that has none of it, which other tests need
import planning
import pytest
import torch
from conftest import ROOT
from models.test_inputs import CPU, opened
from PIL import Image
from torch import Tensor, nn

from simpletuner.app import main
from simpletuner.checkpoints.disk_usage import DiskRoom, DiskUsage
from simpletuner.commands.plan import summary
from simpletuner.counting.block_replay import equal_blocks
from simpletuner.counting.flops import FLOAT32_ON_CUDA
from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_counter import Execution
from simpletuner.counting.step_memory import Workload
from simpletuner.counting.step_trace import trace_step, trace_vae, with_fake_parameters
from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.parallel.devices import MemoryBudget, MemoryEstimate, MemoryInputs, MemoryRow
from simpletuner.parallel.model.blocks import count_parameters
from simpletuner.report import Report
from simpletuner.settings import Settings, load
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.tools.plan.estimate import RunPlan, opened_family
from simpletuner.tools.plan.search import Search, best_of, propose

SIX = ("sdxl", "flux", "sd3", "lumina2", "qwen_image", "sana")
SHAPE = Shape(1, 64, 64)
NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}


class Saved:
    """A tensor that torch has saved, as long as its graph is there."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def storages_alive() -> set[int]:
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return {each.untyped_storage().data_ptr() for each in found}


def saved_by_torch(family: ModelFamily, model: nn.Module, samples: int, shape: SampleShape) -> int:
    """Return the bytes that a real forward pass saves for the backward pass, weights and inputs excluded."""
    inputs = {
        name: torch.ones(samples, *shape, dtype=torch.long if "mask" in name else torch.float32)
        for name, shape in family.input_shapes(*shape).items()
    }
    latents, timesteps = inputs.pop("latents"), torch.full((samples,), 0.5)
    own = storages_alive()  # weights, inputs, and tables that a model holds in no buffer, such as Qwen-Image's
    # Weak, since some graphs end before the loss: of Qwen-Image's last block the text has no use.
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved.add(packed := Saved(tensor))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        loss = family.predict(model, latents, timesteps, inputs).square().mean()
    held = {each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage().nbytes() for each in saved}
    del loss
    return sum(size for address, size in held.items() if address not in own)


@pytest.mark.parametrize("key", SIX)
def test_activations_are_those_that_torch_saves(key, pipelines):
    family, samples = opened(key, pipelines(key)), 8
    real = family.denoiser().to_empty(device=CPU).train()
    for parameter in real.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.requires_grad else parameter.data.zero_()
    mode = RememberingMode()
    fake = with_fake_parameters(family.denoiser().train(), mode)
    found = {}
    for recomputes in (False, True):
        for model in (real, fake):
            model.enable_gradient_checkpointing() if recomputes else model.disable_gradient_checkpointing()
        equal = equal_blocks(fake, family.unused_parameters())
        trace = trace_step(family, fake, mode, family.input_shapes(SHAPE), samples, Execution(torch.float32), equal)
        found[recomputes] = trace
        assert trace.kept_bytes == pytest.approx(saved_by_torch(family, real, samples, SampleShape(SHAPE)), rel=0.1)
        assert [fraction for _, fraction in trace.backward_points] == sorted(each for _, each in trace.backward_points)
    assert found[True].kept_bytes < found[False].kept_bytes
    assert found[True].product_flops > found[False].product_flops
    assert not any(parameter.grad is not None for parameter in fake.parameters())


def test_a_first_frame_costs_what_torch_saves_for_it(pipelines):
    """LTX-Video embeds one time for all tokens, or with a first frame a time for each."""
    family = opened("ltxvideo", pipelines("ltxvideo"))
    real = family.denoiser().to_empty(device=CPU).train()
    for parameter in real.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.requires_grad else parameter.data.zero_()
    mode, saved, counted = RememberingMode(), [], []
    fake = with_fake_parameters(family.denoiser().train(), mode)
    for has_first_frame in (False, True):
        shape = SampleShape(Shape(17, 64, 64), has_first_frame=has_first_frame)
        saved.append(saved_by_torch(family, real, 8, shape))
        trace = trace_step(family, fake, mode, family.input_shapes(*shape), 8, Execution(torch.float32))
        counted.append(trace.kept_bytes)
    assert saved[1] > 1.2 * saved[0]
    assert counted[1] - counted[0] == pytest.approx(saved[1] - saved[0], rel=0.01)


def test_a_published_model_is_counted_as_it_was_on_meta_tensors():
    """FLUX.1-dev at 1024 px and batch 8 in bf16: 13.6 GB at rest, 18.7 GB at most, counted once by other means."""
    flags = {"model_family": "flux", "model_flavour": "dev", "state_layout": "split", "gradient_checkpointing": True}
    loaded = load(flags, environment=NOWHERE, complete=False)
    with opened_family(loaded.settings, Report(quiet=True)) as family:
        trace = Workload(family, SampleShape(Shape(1, 1024, 1024))).trace(loaded.settings, 8, on_gpu=True)
    assert trace.kept_bytes == pytest.approx(13.6e9, rel=0.02)
    assert trace.peak_bytes(0) == pytest.approx(18.7e9, rel=0.05)
    # a third more than the 3 x 74.4 TFLOP of forward and backward: the blocks run forward twice
    assert trace.product_flops + trace.attention_flops == pytest.approx(8 * 297.5e12, rel=0.03)


def test_a_vae_takes_its_weights_and_what_is_live_at_once(pipelines):
    family = opened("sdxl", pipelines("sdxl"))
    shape = Shape(1, 128, 256)
    few, many = (
        trace_vae(build_on_meta(family.vae_config).eval(), torch.float32, shape, count, False) for count in (1, 3)
    )
    weights = 4 * count_parameters(build_on_meta(family.vae_config))
    assert weights < few < many
    assert many - weights == pytest.approx(3 * (few - weights), rel=0.05)


ENGINES = ["whole", "split whole", "fsdp2", "split fsdp2", "fsdp2-cpu"]


def test_engines_hold_what_is_estimated(run_on, pipelines, tmp_path):
    base = {"family": "flux", "base": str(pipelines("flux")), "folder": str(tmp_path), "pictures": str(tmp_path)}
    for name, pairs in run_on(planning.held_in_turn, 2, base, ENGINES).items():
        for held, estimated in pairs:
            assert held == pytest.approx(estimated, rel=0.05), name


SAVED = ["ema whole", "split fsdp2", "lora whole", "muon lora whole", "adagrad whole"]
SAVED += [f"{name} fsdp2" for name in ("adam", "lion", "prodigy", "ema adamw_schedulefree")]
OF_CONVOLUTIONS = ["adafactor whole", "adafactor fsdp2", "muon fsdp2"]
"""Their moments depend on the dimensions of a weight: of a U-Net, whose steps cost three times as much."""


ADAPTERS = ["dora lora whole", "loha lora fsdp2", "lokr lora whole", "oft lora fsdp2"]


def test_every_optimizer_holds_and_writes_what_is_estimated(run_on, arguments_of):
    found = run_on(planning.saved_in_turn, 2, arguments_of("flux2", mixed_precision="bf16"), SAVED)
    of_unet = arguments_of("sdxl")  # a CPU with AVX2 alone takes 20 times as long for a convolution in bf16
    found |= run_on(planning.saved_in_turn, 2, of_unet, [*OF_CONVOLUTIONS, *ADAPTERS])
    assert [*found] == [*SAVED, *OF_CONVOLUTIONS, *ADAPTERS]
    # Of these the names in files take more than the weights of a tiny model.
    small = {name: {kind: found[name].pop(kind) for kind in ("copies", "moments")} for name in ADAPTERS}
    assert not differing(small, ["copies", "moments"])
    assert not differing({name: found[name] for name in found if name not in small}, ["copies", "moments", "disk"])


ZERO_SAVED = ["zero1", "muon zero1", "ema adagrad zero2", "muon zero2-cpu", "lion zero3"]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_zero_writes_what_is_estimated(run_on, arguments_of):
    found = run_on(planning.saved_in_turn, 2, arguments_of("flux2"), ZERO_SAVED)
    found |= run_on(planning.saved_in_turn, 2, arguments_of("sdxl"), ["muon zero3"])  # which has convolutions
    assert [*found] == [*ZERO_SAVED, "muon zero3"]
    assert not differing(found, ["copies", "disk"])


def differing(found: dict[str, dict[str, tuple[int, int]]], kinds: list[str]) -> list[str]:
    """Return what was estimated with an error of more than 5 %."""
    assert all([*pairs] == kinds for pairs in found.values())
    return [
        f"{name}: {estimated} bytes of {kind} estimated, {real} taken"
        for name, pairs in found.items()
        for kind, (real, estimated) in pairs.items()
        if estimated != pytest.approx(real, rel=0.05)
    ]


@pytest.mark.parametrize("flags", [["--optimizer=muon"], ["--use_ema"], ["--model_type=lora", "--lora_rank=64"]])
def test_nfs_check_needs_what_plan_counts(flags, run, pipelines, tmp_path, capsys):
    flags = [*flags, f"--pretrained_model_name_or_path={pipelines('sdxl')}", "--max_train_steps=700", "--json"]
    run(*flags)
    planned = json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["nfs", "check", "--nodes=1", "--model_family=sdxl", f"--path={tmp_path}", *flags])
    (space,) = (each for each in json.loads(capsys.readouterr().out)["checks"] if each["check"] == "space")
    assert space["values"]["need_bytes"] == planned["disk_bytes"] > 2 * planned["checkpoint_bytes"]


def plan_of(settings, bytes_by_batch: float, seconds: float) -> RunPlan:
    """Return a plan as `estimate_run` would, from a number of bytes and seconds."""
    memory = MemoryEstimate(MemoryInputs(1, 1), (MemoryRow("all", gpu=bytes_by_batch),))
    return RunPlan(settings, memory, {"training": memory.gpu_bytes}, seconds, None, 10, 1, DiskUsage(1, "", 1, 1, 1, 1))


def test_any_phase_may_be_what_does_not_fit():
    memory = MemoryEstimate(MemoryInputs(1, 1), (MemoryRow("all", gpu=5 << 30, host=3 << 30),))
    phases = {"encoding captions": 10 << 30, "training": memory.gpu_bytes, "validating": None}
    plan = RunPlan(Settings(), memory, phases, None, None, None, 1, DiskUsage(1, "", 1, 1, 1, 1))
    assert plan.shortfall(MemoryBudget(10 << 30, 3 << 30)) == plan.shortfall(MemoryBudget()) == ""
    assert plan.shortfall(MemoryBudget(8 << 30)) == "10.0 GiB per GPU while encoding captions"
    assert plan.shortfall(MemoryBudget(10 << 30, 2 << 30)) == "3.0 GiB of memory per machine"


def at_least(settings: Settings) -> MemoryEstimate:
    """Return what `estimated` adds whatever the step is."""
    floor = 20 if settings.optimizer.state_layout == "fp32" else 10
    return MemoryEstimate(MemoryInputs(1, 1), (MemoryRow("all", gpu=floor / 2),))


def estimated(loaded) -> RunPlan:
    """Recomputation halves the memory and costs a third; float32 takes 10 bytes more; batches are faster together."""
    settings = loaded.settings
    recomputed, batch = settings.training.gradient_checkpointing, settings.training.train_batch_size
    size = batch * (5 if recomputed else 10) + (20 if settings.optimizer.state_layout == "fp32" else 10)
    size /= 1 + settings.parallel.fsdp_offload_params
    speed = (1.33 if recomputed else 1.0) * (1 + 1 / batch) * (5 if settings.parallel.fsdp_offload_params else 1)
    return plan_of(settings, size, speed * 4)


@pytest.mark.parametrize(
    ("gpu_bytes", "typed", "wanted"),
    [
        (60, {}, {"gradient_checkpointing": False}),
        (50, {}, {"gradient_checkpointing": False, "state_layout": "split"}),
        (
            29,
            {},
            {
                "state_layout": "split",
                "train_batch_size": 1,
                "gradient_accumulation_steps": 4,
                "gradient_checkpointing": False,
            },
        ),
        (
            30,
            {"state_layout": "fp32"},
            {"train_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": False},
        ),
    ],
)
def test_the_fastest_settings_that_fit_are_proposed(gpu_bytes, typed, wanted):
    flags = {"model_family": "sdxl", "train_batch_size": 4, **typed}

    def with_settings(values):
        return load({**flags, **values}, environment=NOWHERE, complete=False)

    search = Search(with_settings, estimated, at_least, MemoryBudget(gpu_bytes))
    plan, changed, reasons = propose(with_settings({}), search, Report(quiet=True))
    assert changed == wanted and plan.peak_bytes <= gpu_bytes
    assert plan.settings.effective_batch_size == 4
    assert not reasons.keys() & typed.keys() and all(reasons.values())
    assert reasons["fsdp_enable"] == "true would take as long"


def test_the_base_of_a_lora_is_as_coarse_as_the_gpu_needs():
    """FLUX.2-dev has 32 billion weights, of which 24 GB hold half in 4 bits."""
    flags = {"model_family": "flux2", "model_flavour": "dev", "model_type": "lora", "train_batch_size": 1}

    def with_settings(values):
        return load({**flags, **values}, environment=NOWHERE, complete=False)

    def estimated(loaded, seconds: float) -> RunPlan:
        settings = loaded.settings
        base = {"no_change": 64, "int8": 32, "nf4": 17}[settings.lora.base_model_precision]
        offloads = settings.parallel.fsdp_offload_params
        return plan_of(settings, 1 if offloads else base, seconds if offloads else 1.0)

    for gpu_bytes, seconds, wanted in [
        (80, 5, {}),
        (40, 5, {"base_model_precision": "int8"}),
        (24, 5, {"base_model_precision": "nf4"}),
        (24, 1.9, {"fsdp_enable": True, "fsdp_offload_params": True}),
    ]:
        search = Search(with_settings, partial(estimated, seconds=seconds), at_least, MemoryBudget(gpu_bytes))
        _, changed, reasons = propose(with_settings({}), search, Report(quiet=True))
        assert {name: value for name, value in changed.items() if name != "gradient_checkpointing"} == wanted
        assert reasons["base_model_precision"]


def test_where_nothing_fits_the_least_is_named():
    def with_settings(values):
        return load({"model_family": "sdxl", **values}, environment=NOWHERE, complete=False)

    with pytest.raises(SettingsError, match=r"nothing fits: the least needs 0 MiB per GPU while training"):
        propose(with_settings({}), Search(with_settings, estimated, at_least, MemoryBudget(1)), Report(quiet=True))


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., None]:
    """Run the command in this process, which has torch loaded, from an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--model_family=sdxl", "--resolution=64", *arguments])
        assert ended.value.code == code

    return run


def test_the_command_plans_a_run_on_its_own_images(run, pipelines, shapes, capsys):
    flags = ["--aspect_bucket_alignment=16", "--train_batch_size=4", "--num_train_epochs=2", "--gpu=h100", "--json"]
    flags.append("--price=2.5")
    run(f"--pretrained_model_name_or_path={pipelines('sdxl')}", f"--instance_data_dir={shapes}", *flags)
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["steps"] > 0 and min(found["size_px"]) >= 48
    assert found["gpu_bytes"] == pytest.approx(sum(row["gpu"] for row in found["memory"]), rel=1e-6)
    assert found["phases"]["encoding captions"] > 0 and found["phases"]["encoding images"] > 0
    assert 0 < found["mfu"] < 1 and found["checkpoint_bytes"] == 12 * found["parameters"]
    assert not Path("output").exists()
    hourly, price = 2.5 * found["step_seconds"] / 3600, found["price"]
    assert price["run"] == pytest.approx(hourly * found["steps"])
    assert price["1,000 steps"] == pytest.approx(hourly * 1000) and price["epoch"] == pytest.approx(price["run"] / 2)


@pytest.mark.parametrize("sampling", [(), ("--validation_prompt=a red circle",)])
def test_the_denoiser_that_is_not_trained_is_in_host_memory_for_validation(sampling, monkeypatch, capsys):
    flavour = ["--model_family=wan", "--model_flavour=t2v-14b-2.2-low", "--model_type=lora", "--resolution=64"]
    with pytest.raises(SystemExit, match="0"):
        main(["plan", *flavour, "--gpu=h200", "--json", *sampling])
    found = json.loads(capsys.readouterr().out)
    rows = [row for row in found["memory"] if row["name"] == "other denoiser"]
    assert [(row["host"], row["gpu"]) for row in rows] == [(2 * 14_288_491_584, 0)] * len(sampling)


def test_what_is_wrong_with_the_images_is_said_beside_the_plan(run, pipelines, tmp_path, capsys):
    """What the ranks of a run that reads these images at the moment have yet to read is left alone."""
    (scan := Path("output", "cache", "scan", "wide")).mkdir(parents=True)
    (task := scan / "task-of-the-run.arrow").touch()
    base = f"--pretrained_model_name_or_path={pipelines('sdxl')}"
    (wide := tmp_path / "wide").mkdir()
    Image.new("RGB", (160, 80)).save(wide / "1.png")
    (wide / "1.txt").write_text("a rectangle")
    batch = ["--train_batch_size=100", f"--instance_data_dir={wide}", "--aspect_bucket_alignment=16"]
    run(base, *batch, "--gpu=h100", "--json", code=4)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["fits"] and found["step_seconds"] > 0 and found["size_px"] == [80, 48]
    assert "cannot fill the effective batch of 100" in found["problem"]["message"]
    assert said.err.count("cannot fill the effective batch of 100") == 1
    assert said.err.index("cannot fill") < said.err.index("error: the plan is of images that no run would start with")
    run(base, *batch, "--gpu_memory=1MiB", code=3)
    said = capsys.readouterr()
    assert "warning: " in said.err and "cannot fill" in said.err and "error: this does not fit" in said.err
    assert [*scan.iterdir()] == [task]
    run(base, "--instance_data_dir=nothing", "--json", code=4)
    found = json.loads(capsys.readouterr().out)
    assert found["size_px"] == [64, 64] and found["problem"]["message"].endswith("there is no folder nothing")


def test_without_a_gpu_it_says_what_a_name_would_add_and_libraries_say_nothing(run, capsys):
    run("--model_flavour=tiny")
    said = capsys.readouterr()
    assert "--gpu=H100, or another of `plan --help`, says whether it fits and the time of a step" in said.out
    assert "transformers" not in said.err and "Writing model" not in said.err  # but for a phase that takes long


@pytest.mark.long
def test_the_proposal_is_written_into_the_config(run, pipelines, tmp_path, capsys):
    config, base = tmp_path / "run.toml", f"--pretrained_model_name_or_path={pipelines('sdxl')}"
    config.write_text('model_family = "sdxl"  # mine\n')
    run(base, "--auto", "--gpu=RTX 4090", "--train_batch_size=2", f"--apply={config}")
    said = capsys.readouterr()
    told = ("--fsdp_enable=false", "--state_layout=fp32", "--offload_activations=false")  # for fewer traces
    run(base, "--auto", "--gpu=RTX 4090", "--train_batch_size=2", *told)
    printed = {*row_names(said.out), *row_names(capsys.readouterr().out)}
    page = (ROOT / "docs" / "plan.md").read_text()
    page = re.sub(
        r"```console\n[^\n]* --compare\n.*?```", "", page, flags=re.DOTALL
    )  # whose rows are the user's offers
    assert printed >= {*row_names(page)}, "the example is of another version"
    assert "gradient_checkpointing = false" in said.out and "true would take" in said.out
    assert "# mine" in config.read_text() and "gradient_checkpointing = false" in config.read_text()
    small = ("--resolution=32", "--train_batch_size=1")  # for fewer products in bf16
    run(base, f"--config={config}", *small, "--use_cpu", "--measure", "--json")
    measured = json.loads(capsys.readouterr().out)
    assert measured["step_seconds"] > 0 and measured["step_seconds_of"] is None and measured["fits"] is None


def row_names(text: str) -> list[str]:
    """Return the first column of the tables that `plan` prints, and the settings that it gives reasons for."""
    return re.findall(r"^ (\w[\w ]*?)  |^  (\w+):", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--gpu=h10"], 2, "not in the table; did you mean `H100`?"),
        (["--auto", "--use_cpu"], 2, "--auto needs to know the GPU"),
        (["--apply=x.toml"], 2, "--apply needs --auto"),
        (["--price=nan"], 2, "invalid value for '--price'"),
        (["--compare", "--gpu=H100"], 2, "--compare takes GPUs and prices from the user's table"),
        (["--compare"], 2, "there is no table of prices at "),
        (["--gpu_memory=1MiB"], 3, "this does not fit: it needs"),
    ],
)
def test_what_cannot_be_planned_is_said(flags, code, said, run, pipelines, capsys):
    run(f"--pretrained_model_name_or_path={pipelines('sdxl')}", *flags, code=code)
    assert said in capsys.readouterr().err


def test_the_casts_on_a_gpu_are_those_of_cudas_autocast():
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    listed = set()
    for name in ("AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"):
        (body,) = re.findall(rf"#define {name}\(_\)((?:.*\\\n)*.*\n)", header)
        listed |= set(re.findall(r"_\((\w+)", body))
    assert listed == FLOAT32_ON_CUDA


def test_weights_are_rounded_only_where_a_step_takes_half_as_long_or_nothing_else_fits():
    def candidate(layout: str, seconds: float) -> Any:
        settings = load({"state_layout": layout, "model_family": "sdxl"}, complete=False).settings
        return {"state_layout": layout}, SimpleNamespace(settings=settings, step_seconds=seconds)

    offered = [candidate("split", 1.0), candidate("bf16", 0.6), candidate("fp32", 2.0), candidate("split", 0.995)]
    assert best_of(offered) is offered[0], "the first of those that are equally fast"
    rounded = candidate("bf16", 0.49)
    assert best_of([*offered, rounded]) is rounded and best_of([rounded]) is rounded


def test_a_plan_says_what_is_free_where_the_run_writes(tmp_path):
    memory, usage = MemoryEstimate(MemoryInputs(1, 1), (MemoryRow("all", gpu=1 << 30),)), DiskUsage(1, "", 6, 10, 1, 1)
    rows = {}
    for free in (None, 59, 60):
        room = DiskRoom(tmp_path, usage, free, 60, 4)
        plan = RunPlan(Settings(), memory, {"training": 1 << 30}, None, None, 9, 1, usage, room)
        rows[free] = dict(summary(plan, MemoryBudget(), None))
        assert (room.problem is not None) == (free == 59)
    assert "free there" not in rows[None] and rows[59]["free there"] == "no: 59 bytes, of which it takes 60 bytes"
    assert rows[60]["free there"] == "60 bytes, of which it takes 60 bytes"
