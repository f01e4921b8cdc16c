"""New config files: each has an output_dir of its own, and a LoRA a LoRA's learning rate."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.tools.config_files import new_config, own_output_dir


@pytest.mark.parametrize(
    ("target", "output"),
    [
        ("cat.toml", "output/cat"),
        ("config/config.toml", "output/config"),
        ("config/dogs/config.json", "output/dogs"),
        ("config.toml", "output/config"),
        ("my cat.v2.toml", "output/my cat.v2"),
        ("config/.env", "output/env"),
        ("{env:HOME}:x.toml", "output/-env-HOME-x"),
    ],
)
def test_each_config_file_has_an_output_dir_of_its_own(target, output, tmp_path):
    assert own_output_dir(target, root=tmp_path) == output
    assert own_output_dir(target, {output}, tmp_path) == f"{output}-2", "another file says it"
    (tmp_path / output).mkdir(parents=True)
    (tmp_path / f"{output}-2").mkdir()
    assert own_output_dir(target, root=tmp_path) == f"{output}-3", "somebody's run is there"
    (tmp_path / "output" / "checkpoints").mkdir()
    assert own_output_dir(target, root=tmp_path) == output.replace("output/", "outputs/"), "output itself is a run"


def test_config_init_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, kind in (("dog", "full"), ("cat", "lora")):
        with pytest.raises(SystemExit, match="0"):
            main(["config", "init", "--model_family=sdxl", f"--model_type={kind}", f"--output={name}.toml"])
        written = tomllib.loads(Path(f"{name}.toml").read_text())
        assert (written["output_dir"], written["model_type"]) == (f"output/{name}", kind)
        assert list(written)[:1] == ["model_type"] and ("lora_rank" in written) == (kind == "lora")
    assert written["learning_rate"] == 1e-4
    with pytest.raises(SettingsError, match="recipe sdxl-style is for model_type = lora, not full"):
        new_config("", "", "1", "sdxl-style", model_type="full")
    assert 'output_dir = "output/style"' in new_config("", "", "1", "sdxl-style", "style.toml").text


def test_a_lora_at_the_rate_of_a_full_run_is_said(tmp_path):
    flags = {"model_family": "sdxl", "instance_data_dir": str(tmp_path), "model_type": "lora"}

    def warnings(**more: str) -> str:
        return "\n".join(map(str, load({**flags, **more}, None).warnings))

    assert "a LoRA is usually trained at 0.0001" in warnings()
    assert "a LoRA is usually trained at 0.0001" in warnings(learning_rate="1e-5"), "as `config init` writes it"
    for more in ({"learning_rate": "1e-4"}, {"learning_rate": "2e-5"}, {"model_type": "full"}):
        assert "usually trained" not in warnings(**more)
    assert "usually trained" not in warnings(optimizer="prodigy", learning_rate="1")


def test_a_folder_of_images_is_written_into_the_file():
    text = new_config("sdxl", "", "1", target="a.toml", images=Path("my photos")).text
    assert 'instance_data_dir = "my photos"' in text
    assert 'instance_data_dir = "photos"' in new_config("", "", "1", "sdxl-style", images=Path("photos")).text
    with pytest.raises(SettingsError, match="lists datasets"):
        new_config("", "", "1", "kontext-edit", images=Path("photos"))
