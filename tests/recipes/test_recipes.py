"""Recipes are settings that exist, with sources; `config init` writes a file of them that can start a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.models.catalog.registry import trainable_flavours
from simpletuner.recipes.library import FOLDER, find_recipe, recipe_names, recipes
from simpletuner.recipes.recipe import OWN_SOURCES, REQUIRED, Chosen
from simpletuner.settings import load, settings_as_json

DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?")
SMALLEST = """\
version = 1
date = 2026-11-26
title = "Mine"
purpose = "style"
model_family = "sdxl"
model_flavour = "base-1.0"
data = "images"
expect = "nothing"

[sources.a]
kind = "paper"
title = "A paper"
url = "https://arxiv.org/abs/2106.09685"

[settings]
model_type = { value = "lora", source = "yours", because = "small" }
resolution = { value = 512, source = "a", says = "512" }
caption_dropout_probability = { value = 0.1, source = "not proven here", because = "a guess" }
train_batch_size = { value = 1, source = "not proven here", because = "a guess" }
gradient_accumulation_steps = { value = 3, source = "not proven here", because = "a guess" }
learning_rate = { value = 1e-4, source = "a", says = "0.0001" }
lr_scheduler = { value = "constant", source = "a", says = "constant" }
lr_warmup_steps = { value = 0, source = "a", says = "0" }
max_train_steps = { value = 7, source = "a", says = "7" }
gradient_checkpointing = { value = true, source = "a", says = "yes" }
validation_guidance = { value = 5.0, source = "a", says = "5" }
validation_prompt = { value = [], source = "yours", because = "none" }
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run the command line in this process; return exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def test_there_are_recipes_of_each_purpose_and_of_several_families():
    found = recipes()
    assert len(found) >= 8 and {each.purpose for each in found} == {"style", "subject", "full", "edit", "video"}
    assert len({each.model_family for each in found}) >= 8
    assert all(each.model_flavour in trainable_flavours(each.model_family) for each in found)


@pytest.mark.parametrize("name", recipe_names())
def test_what_a_source_says_has_the_value(name):
    recipe = find_recipe(name)
    for key, chosen in {**recipe.settings, **recipe.dataset_values}.items():
        if chosen.source not in OWN_SOURCES and not isinstance(chosen.value, bool):
            assert is_in(chosen), f"{name}: {key} = {chosen.value}, and {chosen.source} says {chosen.says}"


def is_in(chosen: Chosen) -> bool:
    numbers = [float(found.replace(",", "")) for found in NUMBER.findall(chosen.says)]
    return chosen.value in numbers if isinstance(chosen.value, int | float) else chosen.value in chosen.says


@pytest.mark.parametrize("name", recipe_names())
def test_a_file_of_a_recipe_can_start_a_run_and_says_where_each_value_is_from(run, name):
    recipe = find_recipe(name)
    code, out, err = run("config", "init", f"--recipe={name}")
    assert (code, out) == (0, "") and err.startswith("config/config.toml is written")
    text = Path("config/config.toml").read_text()
    for folder in [each["instance_data_dir"] for each in recipe.datasets] or ["pictures"]:
        Path(folder).mkdir()
        Path(folder, "a.png").touch()
    code, _, err = run("config", "validate", "config/config.toml")
    assert (code, err.count("warning")) == (0, 0), err
    loaded = load({})
    written = settings_as_json(loaded)
    assert {key: written[key] for key in recipe.settings} == {key: each.value for key, each in recipe.settings.items()}
    assert (written["model_family"], written["model_flavour"]) == (recipe.model_family, recipe.model_flavour)
    assert f"# Recipe {name}, version {recipe.version} of {recipe.date}: {recipe.title}." in text
    for key, chosen in recipe.settings.items():
        assert f"# {chosen.grounds()}\n{key} = " in text or isinstance(chosen.value, list)
    assert all(source.url in text for source in recipe.sources.values())
    assert all(each.grounds() in text for each in recipe.dataset_values.values())
    names = re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE)
    assert len(names) == len({*names}), "no setting stands twice"
    assert max(map(len, text.splitlines())) < 400 and not re.search(r"^#.*\n(?=[^#\n\w])", text, re.MULTILINE)


def test_what_is_typed_outranks_a_recipe_and_ranks_share_its_batch(run):
    assert run("config", "init", "--recipe=SDXL_subject", "--model_flavour=tiny", "--num_processes=2")[0] == 0
    settings = load({}, complete=False).settings
    assert (settings.model.model_flavour, settings.launch.num_processes, settings.parallel.fsdp_enable) == (
        "tiny", 2, True,
    )  # fmt: skip
    assert (
        settings.effective_batch_size == 4 == find_recipe("sdxl-subject").settings["gradient_accumulation_steps"].value
    )
    text = Path("config/config.toml").read_text()
    assert "4 in the recipe, shared by 2 GPUs" in text and "the recipe is for base-1.0" in text
    assert run("config", "init", "--recipe=sd15-subject", "--num_processes=2", "--force")[0] == 0
    assert "with 2 GPUs a step has 2 times as many samples" in Path("config/config.toml").read_text()


def test_neither_file_is_written_over_another(run):
    Path("config").mkdir()
    Path("config/config.datasets.json").write_text("mine")
    code, _, err = run("config", "init", "--recipe=kontext-edit")
    assert code == 2 and "config/config.datasets.json exists already" in err
    assert not Path("config/config.toml").exists()
    assert run("config", "init", "--recipe=kontext-edit", "--output=a/b.toml")[0] == 0
    assert load({}, Path("a/b.toml"), complete=False).settings.data.data_backend_config == Path("a/b.datasets.json")
    assert [each["id"] for each in json.loads(Path("a/b.datasets.json").read_text())] == ["after", "before"]


def test_recipes_are_shown_with_every_source(run):
    code, out, _ = run("recipes")
    assert code == 0 and all(re.search(rf"^ {name} .* 1 of 2026-", out, re.MULTILINE) for name in recipe_names())
    code, out, _ = run("recipes", "wan-video")
    assert code == 0 and "num_frames" in out and "not proven here" in out and "--train_steps 3000" in out
    assert all(source.url in out for source in find_recipe("wan-video").sources.values())
    listed = json.loads(run("recipes", "--json")[1])
    assert [each["name"] for each in listed] == list(recipe_names())
    assert json.loads(run("recipes", "wan-video", "--json")[1]) in listed
    file = tomllib.loads((FOLDER / "wan-video.toml").read_text())
    assert listed[-2]["settings"] == file["settings"] and listed[-2]["sources"] == file["sources"]


def test_recipes_need_no_torch():
    code = (
        "import sys; from simpletuner.app import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    for arguments in (["recipes"], ["config", "init", "--recipe=flux-style"]):
        assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["recipes", "flux-stile"], "there is no recipe 'flux-stile'; did you mean `flux-style`?"),
        (["config", "init", "--recipe=sdxl"], "there is no recipe 'sdxl'"),
        (
            ["config", "init", "--recipe=sdxl-full", "--model_family=flux"],
            "recipe sdxl-full is for model_family = sdxl",
        ),
        (["config", "init", "--recipe=sdxl-full", "--model_flavour=dev"], "Unknown model_flavour 'dev' of sdxl"),
        (["recipes", "none.toml"], "cannot read none.toml"),
    ],
)
def test_a_recipe_that_is_not_there_ends_with_one_sentence(run, arguments, sentence):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and sentence in err and "Traceback" not in err and not Path("config").exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('title = "Mine"', "", "mine.toml: title: Field required"),
        ("version = 1", "version = 1\nauthor = 2", "mine.toml: author: Extra inputs are not permitted"),
        ('"style"', '"art"', "mine.toml: purpose: Input should be 'style'"),
        (', says = "512"', "", "mine.toml: settings.resolution: a value with a source needs `says`"),
        (', because = "a guess"', "", "a value that is not proven here needs `because`"),
        ("learning_rate = {", "lerning_rate = {", "mine.toml: settings: lerning_rate cannot be set by a recipe"),
        ("learning_rate = {", "#", "mine.toml: settings: learning_rate is missing"),
        ('source = "a", says = "7"', 'source = "b", says = "7"', "[sources] and those that values name differ: b"),
        ("https:", "ftp:", "mine.toml: sources.a.url: String should match"),
        ("value = 1e-4", 'value = "fast"', "learning_rate = 'fast' (recipe mine): use a number"),
        ("base-1.0", "base-3", "Unknown model_flavour 'base-3' of sdxl"),
        ("[settings]", "[settings", "mine.toml does not parse"),
        ],
)  # fmt: skip
def test_a_recipe_of_ones_own_is_checked(run, old, new, sentence):
    Path("mine.toml").write_text(SMALLEST)
    assert run("recipes", "mine.toml")[0] == 0 and run("config", "init", "--recipe=mine.toml")[0] == 0
    assert "# a: 0.0001\nlearning_rate = 0.0001\n" in Path("config/config.toml").read_text()
    assert old in SMALLEST
    Path("mine.toml").write_text(SMALLEST.replace(old, new))
    code, out, err = run("config", "init", "--recipe=mine.toml", "--output=new.toml")
    assert (code, out) == (2, "") and sentence in err and "Traceback" not in err, err
    assert not Path("new.toml").exists()
    code, out, err = run("recipes", "mine.toml")
    assert (code, out) == (2, "") and sentence in err


def test_numbers_of_datasets_have_sources_too(run):
    clips = '\n[[datasets]]\nid = "a"\ninstance_data_dir = "a"\nvideo = { num_frames = 9 }\n'
    Path("mine.toml").write_text(SMALLEST + clips)
    code, _, err = run("recipes", "mine.toml")
    assert code == 2 and "[dataset_values] must have each number of [[datasets]]" in err
    Path("mine.toml").write_text(
        SMALLEST + clips + '[dataset_values]\nnum_frames = { value = 9, source = "a", says = "9" }\n'
    )
    assert run("recipes", "mine.toml")[0] == 0


def test_the_recipe_that_the_page_shows_is_one(run):
    [shown] = re.findall(r"^```toml\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    Path("mine.toml").write_text(shown)
    assert run("config", "init", "--recipe=mine.toml")[0] == 0
    assert "These twelve settings" in DOCS.read_text() and len(REQUIRED) == shown.count("{ value = ") == 12


def test_the_page_of_recipes_has_each_of_them():
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.* \| .*) \|$", DOCS.read_text(), re.MULTILINE))
    memory = {each.name: f"{each.memory_gib:.1f} GiB" if each.memory_gib else "not counted" for each in recipes()}
    shown = {
        each.name: f"{each.purpose} | {each.model_family} `{each.model_flavour}` | {memory[each.name]} | "
        f"{each.settings['learning_rate'].value:g} | {each.settings['max_train_steps'].value}"
        for each in recipes()
    }
    assert rows == shown
