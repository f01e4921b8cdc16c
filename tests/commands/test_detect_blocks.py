"""`simpletuner detect-blocks` and `simpletuner models`, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.models.catalog.registry import AUTO, flavours_of, presets
from simpletuner.system.files.cache_files import block_cache_paths

PAGE = Path(__file__).parents[2] / "docs" / "blocks.md"
LORA_PAGE = PAGE.with_name("lora.md")
HEAVY = ("torch", "numpy", "PIL", "diffusers", "transformers", "accelerate", "deepspeed")
KEYS = {
    "model_family",
    "model_flavour",
    "pretrained_model",
    "total_parameters",
    "classes",
    "recommended",
    "cached",
    "detected_at",
    "fingerprint",
}
CLASS_KEYS = {"class_name", "count", "parameters", "share", "bytes_bf16", "bytes_fp32", "sample_paths", "no_split"}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder, with a user's home and caches of its own."""
    for name, folder in (("SIMPLETUNER_HOME", "home"), ("XDG_CACHE_HOME", "cache"), ("HF_HOME", "hub")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(home) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in a process of its own, without a terminal."""

    def run(*arguments: str, code: int = 0, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *python, "-m", "simpletuner", *arguments]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def typed(home, capsys) -> Callable[..., str]:
    """Run the program in this process, which has torch loaded; return what it prints."""

    def typed(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.out + said.err

    return typed


@pytest.fixture
def folder(home) -> Path:
    """Return a denoiser's folder: a U-Net, whose blocks contain one another."""
    config = {
        "_class_name": "UNet2DConditionModel",
        "block_out_channels": [32, 64],
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "transformer_layers_per_block": [1, 3],
        "cross_attention_dim": 32,
    }
    (home / "unet").mkdir()
    (home / "unet" / "config.json").write_text(json.dumps(config))
    return home / "unet"


def test_a_published_model_is_looked_at_remembered_and_applied(run, home):
    (home / "run.toml").write_text(
        'model_family = "flux"\nmodel_flavour = "dev"  # not krea\n[deepspeed_config.zero_optimization]\nstage = 2\n'
    )
    cold = run("detect-blocks", "--model-family=flux", "--model-flavour=dev")
    assert cold.stderr == ""
    assert max(map(len, cold.stdout.splitlines())) <= 80
    rows = [line.split() for line in cold.stdout.splitlines() if line.startswith("* ")]
    assert [row[:3] + row[-2:] for row in rows] == [
        ["*", "FluxTransformerBlock", "19", "54.3%", "█████████▎"],
        ["*", "FluxSingleTransformerBlock", "38", "45.2%", "███████▋"],
    ]
    assert "taken: repeats in transformer_blocks" in cold.stdout
    assert "recommended FluxTransformerBlock,FluxSingleTransformerBlock" in cold.stdout
    assert "57 hold 99.5% of the weights" in cold.stdout
    assert cold.stdout.partition("from  ")[0] in PAGE.read_text(), "docs/blocks.md shows what is printed"
    warm = run("detect-blocks", "--config=run.toml", "--apply=run.toml", python=("-X", "importtime"))
    assert "cached 20" in " ".join(warm.stdout.split())
    assert warm.stdout.partition("from  ")[0] == cold.stdout.partition("from  ")[0]
    imported = {line.rpartition("|")[2].strip() for line in warm.stderr.splitlines()}
    assert "simpletuner.app" in imported and not imported & set(HEAVY)
    assert (home / "run.toml").read_text() == (
        'model_family = "flux"\nmodel_flavour = "dev"  # not krea\n'
        'fsdp_transformer_layer_cls_to_wrap = "FluxTransformerBlock,FluxSingleTransformerBlock"\n'
        "[deepspeed_config.zero_optimization]\nstage = 2\n"
    )
    again = run("detect-blocks", "--apply", "run.toml", "--json")
    assert "run.toml has that value already" in again.stderr and json.loads(again.stdout)["cached"]


def test_json_says_everything(typed, folder):
    found = json.loads(typed("detect-blocks", f"--pretrained_model_name_or_path={folder}", "--json"))
    assert set(found) >= KEYS and not found["cached"]
    assert all(set(item) >= CLASS_KEYS for item in found["classes"])
    classes = {item["class_name"]: item for item in found["classes"]}
    assert classes["ResnetBlock2D"]["no_split"] and not classes["Linear"]["no_split"]
    assert classes["Linear"]["bytes_bf16"] * 2 == classes["Linear"]["bytes_fp32"] == classes["Linear"]["parameters"] * 4
    assert "mid_block.resnets.0" not in classes["ResnetBlock2D"]["sample_paths"]
    taken = [item["class_name"] for item in found["classes"] if item["recommended"]]
    assert taken == found["recommended"] == ["Transformer2DModel", "ResnetBlock2D"]
    assert (
        sum(found["outside"].values()) + sum(classes[name]["parameters"] for name in taken) == found["total_parameters"]
    )
    name = f"--pretrained_model_name_or_path={folder}"
    assert json.loads(typed("detect-blocks", name, "--json"))["cached"]
    assert not json.loads(typed("detect-blocks", name, "--json", "--refresh"))["cached"]


def test_nothing_to_wrap_is_said_and_not_applied(typed, home):
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}
    (home / "config.json").write_text(json.dumps(config))
    (home / "run.toml").write_text("")
    said = typed("detect-blocks", "--pretrained_model_name_or_path=.", "--apply=run.toml", code=2)
    assert "recommended nothing" in said and "nothing is written" in said
    assert (home / "run.toml").read_text() == ""


def test_mistakes_are_told(typed):
    said = typed("detect-blocks", "--model_family=fluks", code=2)
    assert "did you mean `flux`?" in said and "`simpletuner models`" in said
    assert "--apply_to" in typed("detect-blocks", "--model_family=flux", "--apply_to=x", code=2)
    assert "no model: set model_family" in typed("detect-blocks", code=2)


def test_cache_list_counts_what_is_remembered_and_clear_forgets_it(typed, folder):
    name = f"--pretrained_model_name_or_path={folder}"
    typed("detect-blocks", name)
    path, _ = block_cache_paths()
    [item] = json.loads(typed("cache", "list", "--json"))
    assert (item["kind"], item["path"], item["entries"]) == ("blocks", str(path), 1)
    typed("cache", "clear", "blocks")
    assert list(path.parent.iterdir()) == []
    assert not json.loads(typed("detect-blocks", name, "--json"))["cached"]


def test_models_lists_every_family_and_flavour_without_torch(run):
    listed = json.loads(run("models", "--json").stdout)
    assert listed.pop()["model_family"] == AUTO
    assert {family["model_family"]: [item["model_flavour"] for item in family["flavours"]] for family in listed} == {
        key: list(flavours_of(key)) for key in presets()
    }
    done = run("models", python=("-X", "importtime"))
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and lines[lines.index(AUTO) + 1].startswith("  any other pipeline of diffusers")
    for family in listed:
        at = lines.index(family["model_family"])
        assert family["objective"] in lines[at + 1]
        for flavour in family["flavours"]:
            row = next(n for n, line in enumerate(lines) if n > at and f" {flavour['model_flavour']} " in line)
            assert flavour["hub"] in " ".join(lines[row : row + 2])
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & set(HEAVY)


def test_models_names_families_of_installed_packages(typed, home, monkeypatch):
    metadata = home / "site" / "my_models-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-models\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[simpletuner.families]\nmine = my.models:MINE\n")
    monkeypatch.syspath_prepend(str(home / "site"))
    assert typed("models").endswith("mine\n  from an installed package: my.models:MINE\n")
    assert json.loads(typed("models", "--json"))[-1] == {"model_family": "mine", "traits": "my.models:MINE"}


def test_lora_shows_the_attention_projections_as_the_page_has_them(typed, home):
    said = typed("detect-blocks", "--model_family=sdxl", "--lora")
    assert said.strip() in LORA_PAGE.read_text()
    (home / "c.json").write_text('{"model_family": "sdxl", "model_type": "lora", "lora_rank": 64}')
    assert "92,897,280 parameters at lora_rank = 64" in typed("detect-blocks", "--config=c.json", "--lora")
    targets = json.loads(typed("detect-blocks", "--model_family=sdxl", "--json"))["lora_targets"]
    assert targets["to_q"] == {"layers": 140, "parameters_per_rank": 332_800}
