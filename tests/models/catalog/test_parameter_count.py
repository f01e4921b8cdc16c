from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from simpletuner.models.catalog.architecture import parameters_in, parameters_of
from simpletuner.settings.declared.sections import Model


def safetensors(path: Path, *shapes: list[int]) -> None:
    """Write a file as the format's description says: length of the header, header, numbers."""
    header = {"__metadata__": {"format": "pt"}}
    header |= {f"t{i}": {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for i, s in enumerate(shapes)}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_a_folder_of_weights_is_counted_from_its_headers(tmp_path):
    safetensors(tmp_path / "unet" / "diffusion_pytorch_model-00001-of-00002.safetensors", [10, 3], [5])
    safetensors(tmp_path / "unet" / "diffusion_pytorch_model-00002-of-00002.safetensors", [])
    safetensors(tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors", [7])
    safetensors(tmp_path / "vae" / "diffusion_pytorch_model.safetensors", [1000])
    model = Model(model_family="sdxl", pretrained_model_name_or_path=str(tmp_path))
    assert parameters_of(model) == (36, f"counted in {tmp_path / 'unet'}")
    assert parameters_of(model.model_copy(update={"variant": "fp16"})) == (7, f"counted in {tmp_path / 'unet'}")


def test_what_is_no_file_of_weights_counts_nothing_and_is_not_waited_for(tmp_path):
    fifo, folder, deep = tmp_path / "fifo.safetensors", tmp_path / "folder", tmp_path / "deep.safetensors"
    os.mkfifo(fifo)
    folder.mkdir()
    deep.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    assert [parameters_in(path) for path in (fifo, folder, deep, tmp_path / "nothing")] == [0, 0, 0, 0]


def test_a_published_model_is_known_by_its_family():
    assert parameters_of(Model(model_family="sdxl")) == (2_567_463_684, "as published for sdxl")
    hub = Model(model_family="flux", pretrained_model_name_or_path="somebody/flux")
    assert parameters_of(hub) == (11_901_408_320, "as published for flux")


@pytest.mark.parametrize("model", [Model(), Model(model_family="x", model_flavour="tiny"), Model(model_family="x")])
def test_what_nobody_has_counted_is_unknown(model):
    assert parameters_of(model) is None


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0[1,2]", b"\xff" * 64, b'\x02\0\0\0\0\0\0\0{"'])
def test_a_damaged_file_counts_nothing(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    assert parameters_in(tmp_path / "x.safetensors") == 0


def test_a_real_pipeline_is_counted_as_torch_counts_it(sdxl):
    counted = parameters_of(Model(model_family="sdxl", pretrained_model_name_or_path=str(sdxl)))
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(sdxl / "unet")
    assert counted == (sum(p.numel() for p in unet.parameters()), f"counted in {sdxl / 'unet'}")
