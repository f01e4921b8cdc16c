"""The trained pipeline: opened part by part by the classes that it names, trained again by every engine, in each
precision, never at the cost of what is not ours."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import torch
from conftest import base
from safetensors import safe_open
from safetensors.torch import load_file

from simpletuner.checkpoints.tensors import read_shapes, read_tensors
from simpletuner.system.files.checksums import with_checksum

ENGINES = {
    "plain": (1, "--train_batch_size=4"),
    "fsdp2": (2, "--train_batch_size=2", "--fsdp_enable", "--export_precision=float8"),
    "fsdp2, full": (
        2,
        "--train_batch_size=2",
        "--fsdp_enable",
        "--fsdp_state_dict_type=full",
        "--export_precision=bf16",
    ),
    "zero2": (2, "--train_batch_size=2", "--zero_stage=2", "--export_precision=fp16"),
    "zero3": (2, "--train_batch_size=2", "--zero_stage=3"),
    "data-parallel": (2, "--train_batch_size=2"),
}
"""In this order, each from what the one before has exported; stages 1 and 2 of ZeRO are one class of DeepSpeed."""


def assert_opened_by_its_own_classes(pipeline: Path, only: str | None = None) -> None:
    """Open every component, or only one, with the class that model_index.json, or its own config.json, names."""
    import diffusers

    index = json.loads((pipeline / "model_index.json").read_text())
    components = {name: value for name, value in index.items() if isinstance(value, list) and any(value)}
    for name, (library, cls) in components.items() if only is None else [(only, components[only])]:
        getattr(importlib.import_module(library), cls).from_pretrained(pipeline / name)
        config = pipeline / name / "config.json"
        if library == "diffusers" and config.exists():
            named = json.loads(config.read_text())["_class_name"]
            assert type(getattr(diffusers, named).from_pretrained(pipeline / name)).__name__ == cls
            diffusers.AutoModel.from_pretrained(str(pipeline / name))


def files_of(pipeline: Path) -> dict[Path, bytes]:
    """Return all files of a pipeline's components but the denoiser."""
    files = [path for path in pipeline.glob("*/*") if path.is_file() and path.parent.name != "unet"]
    return {path.relative_to(pipeline): path.read_bytes() for path in files}


def test_each_engine_trains_what_another_has_exported_and_every_part_opens(sdxl, sdxl_flags, train, tmp_path):
    """All parts of what the first exports; later ones are denoisers beside the same files."""
    pipeline, others = sdxl, files_of(sdxl)
    for name, (world, *flags) in ENGINES.items():
        if "zero" in name and importlib.util.find_spec("deepspeed") is None:
            continue
        output, model = tmp_path / name, f"--pretrained_model_name_or_path={pipeline}"
        train(output, *sdxl_flags, model, *flags, "--max_train_steps=1", "--use_ema", world=world)
        for pipeline in (output / "pipeline", output / "pipeline-ema"):
            assert_opened_by_its_own_classes(pipeline, only=None if name == "plain" else "unet")
            assert files_of(pipeline) == others
            precision = next((each.partition("=")[2] for each in flags if "precision" in each), "fp32")
            assert_rounded_once(pipeline / "unet", trained_weights(output, pipeline.name), precision)
        config = json.loads((output / "checkpoints/checkpoint-000001/model/config.json").read_text())
        assert config["_class_name"] == "UNet2DConditionModel"


def trained_weights(output: Path, pipeline: str) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, or their average, as its run held them: float32."""
    files = [*(output / "checkpoints/checkpoint-000001" / ("ema" if "ema" in pipeline else "model")).glob("*tensors")]
    found = {name: torch.empty(shape) for name, shape in read_shapes(files, "model").items()}
    read_tensors(files, found, "model")
    return found


def assert_rounded_once(folder: Path, trained: dict[str, torch.Tensor], precision: str) -> None:
    """Compare what is exported with the trained weights, rounded to nearest by torch."""
    found = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    assert found.keys() == trained.keys()
    dtypes = Counter(each.dtype for each in found.values())
    exact = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.float8_e4m3fn}
    assert dtypes.keys() == {exact[precision]} | ({torch.bfloat16} if precision == "float8" else set())
    for name, each in found.items():
        assert torch.equal(each.float(), trained[name].to(each.dtype).float()), name
        assert precision != "float8" or (each.dtype == torch.bfloat16) == ("block" not in name or each.ndim != 2)


def test_another_precision_is_exported_again_from_the_last_checkpoint(sdxl_flags, train, tmp_path):
    flags = (*sdxl_flags, "--train_batch_size=4", "--max_train_steps=1")
    train(tmp_path / "run", *flags)
    marker = tmp_path / "run/pipeline/simpletuner.json"
    before = json.loads(marker.read_text())
    del before["precision"], before["checksum"]  # as it was written before there was a choice
    marker.write_text(json.dumps(with_checksum(before)))
    assert "finished already" in train(tmp_path / "run", *flags).said
    half = (*flags, "--export_precision=fp16")
    assert "finished already" not in train(tmp_path / "run", *half).said
    assert_rounded_once(tmp_path / "run/pipeline/unet", trained_weights(tmp_path / "run", "pipeline"), "fp16")
    assert "finished already" in train(tmp_path / "run", *half).said


def test_only_what_the_index_names_is_exported_and_nothing_from_outside(sdxl, shapes, train, tmp_path):
    pipeline, secret = tmp_path / "base", tmp_path / "secret"
    shutil.copytree(sdxl, pipeline)
    secret.mkdir()
    (secret / "id_rsa.txt").write_text("private")
    (pipeline / "extra").symlink_to(secret)
    (pipeline / "notes").mkdir()
    (pipeline / "vae" / "decoy.pickle").write_bytes(b"\x80\x04.")
    os.mkfifo(pipeline / "notes" / "pipe.txt")
    blobs = tmp_path / "elsewhere"  # a component on another disk is the user's own doing
    (pipeline / "text_encoder").rename(blobs)
    (pipeline / "text_encoder").symlink_to(blobs)
    output = pipeline / "runs" / "a"  # within the base model's folder
    flags = (*base("sdxl", pipeline, shapes), "--train_batch_size=4")
    train(output, *flags, "--max_train_steps=1")
    exported = {path.name for path in (output / "pipeline").iterdir()}
    index = json.loads((sdxl / "model_index.json").read_text())
    assert exported == {name for name in index if not name.startswith("_")} - {
        name for name, value in index.items() if not isinstance(value, list) or not any(value)
    } | {"model_index.json", "simpletuner.json", "README.md"}
    assert not list((output / "pipeline").rglob("*.pickle"))
    assert_opened_by_its_own_classes(output / "pipeline")
    for name, problem in (("x.txt", "links to"), ("pipe.json", "not a regular file"), ("gone.txt", "leads nowhere")):
        odd = pipeline / "vae" / name
        if name == "x.txt":
            odd.symlink_to(secret / "id_rsa.txt")
        elif name == "gone.txt":
            odd.symlink_to(odd)
        else:
            os.mkfifo(odd)
        refused = train(tmp_path / name, *flags, "--max_train_steps=1", code=3)
        assert problem in refused.said and "making" not in refused.said, "found before anything is encoded"
        odd.unlink()
    refused = train(pipeline / "vae" / "run", *flags, "--max_train_steps=1", code=3)
    assert "inside a component of the base model" in refused.said


def test_what_is_not_ours_is_neither_replaced_nor_removed(sdxl_flags, train, tmp_path):
    output = tmp_path / "run"
    flags = (*sdxl_flags, "--train_batch_size=4")
    (output / "pipeline").mkdir(parents=True)
    (output / "pipeline" / "thesis.txt").write_text("years")
    refused = train(output, *flags, "--max_train_steps=1", code=3)
    assert f"{output / 'pipeline'} was not written by simpletuner" in refused.said
    assert (output / "pipeline" / "thesis.txt").read_text() == "years"
    shutil.rmtree(output)
    train(output, *flags, "--max_train_steps=1")
    (output / "pipeline" / "README.md").write_text("my model")
    own = (*flags, f"--pretrained_model_name_or_path={output / 'pipeline'}")
    refused = train(output, *own, "--max_train_steps=2", code=3)
    assert "is where the trained pipeline would be written" in refused.said
    train(output, *flags, "--max_train_steps=2")
    assert (output / "pipeline" / "README.md").read_text() == "my model"
    assert json.loads((output / "pipeline" / "simpletuner.json").read_text())["steps"] == 2


def times_of(output: Path) -> dict[Path, int]:
    """Return when each file was written, but for those that every start writes."""
    files = [
        path for path in output.rglob("*") if path.is_file() and path.name not in (".lock", "log.txt", "status.json")
    ]
    return {path: path.stat().st_mtime_ns for path in files}


def test_finished_means_that_the_pipeline_is_whole_and_nothing_else_is_left(sdxl_flags, train, tmp_path):
    output = tmp_path / "run"
    flags = (*sdxl_flags, "--train_batch_size=4", "--max_train_steps=2")
    train(output, *flags)
    weights = next((output / "pipeline" / "unet").glob("*.safetensors"))
    whole = weights.read_bytes()
    before = times_of(output)
    status = json.loads((output / "status.json").read_text())
    killed = {**status, "state": "running", "step": 1}  # written every 2 s at most, so of a step before the end
    (output / "status.json").write_text(json.dumps(killed))
    assert "finished already" in train(output, *flags).said
    status = json.loads((output / "status.json").read_text())
    assert (status["state"], status["step"], status["max_steps"]) == ("finished", 2, 2)
    assert times_of(output) == before, "a start that has nothing to do changes nothing"
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    damages = [lambda: weights.unlink(), lambda: weights.write_bytes(whole[:-10]), lambda: weights.write_bytes(flipped)]
    for harm in damages:
        harm()
        assert "finished already" not in train(output, *flags).said
        assert next((output / "pipeline" / "unet").glob("*.safetensors")).read_bytes() == whole
    marker = output / "pipeline" / "simpletuner.json"
    for text in ("[]", "null", '{"steps": null}', "{"):
        marker.write_text(text)
        train(output, *flags)
        assert json.loads(marker.read_text())["steps"] == 2
    (output / ".pipeline.unfinished").mkdir()
    (output / "pipeline").rename(output / ".pipeline.old")  # killed while the new one took its place
    assert "finished already" in train(output, *flags).said
    shutil.copytree(output / "pipeline", output / ".pipeline.old")  # killed just after that
    assert "finished already" in train(output, *flags).said
    assert not list(output.glob(".pipeline*"))
    with safe_open(next((output / "pipeline" / "unet").glob("*.safetensors")), "pt") as file:
        assert file.keys()
