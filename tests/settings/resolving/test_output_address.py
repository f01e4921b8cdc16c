"""output_dir as an address: a folder here, and its mirror."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.errors import SettingsError
from simpletuner.settings import load, settings_as_json


def test_the_folder_here_has_the_last_name_of_the_address(tmp_path):
    config = tmp_path / "run.toml"
    for written, folder in (("s3://b/runs/flux/", "flux"), ("gs://b", "b"), ("az://c/x", "x")):
        config.write_text(f'output_dir = "{written}"')
        for loaded in (load({"output_dir": written}, complete=False), load({}, config, complete=False)):
            assert loaded.settings.training.output_dir == Path(folder)
            assert loaded.settings.checkpoints.mirror_output == written.rstrip("/")
            values = settings_as_json(loaded)
            assert (values["output_dir"], values["mirror_output"]) == (folder, written.rstrip("/"))
            assert f"output_dir = {written}" in str(loaded.origins["mirror_output"])
    both = load({"output_dir": "s3://b/x", "mirror_output": "s3://b/x"}, complete=False)
    assert both.settings.training.output_dir == Path("x")


def test_another_mirror_is_a_mistake_that_names_both():
    with pytest.raises(SettingsError) as caught:
        load({"output_dir": "s3://b/x", "mirror_output": "s3://b/y"}, complete=False)
    assert "s3://b/x" in caught.value.message and "s3://b/y" in caught.value.message


@pytest.mark.parametrize("written", ["s3:/b/x", "s4://b/x", "https://b/x", "s3://b//x?y"])
def test_an_address_that_is_none_of_a_bucket_is_no_folder(written):
    with pytest.raises(SettingsError) as caught:
        load({"output_dir": written}, complete=False)
    assert "is no folder: use a path, or s3://BUCKET/FOLDER" in caught.value.message


def test_a_folder_stays_a_folder():
    loaded = load({"output_dir": "s3/b", "mirror_output": "s3://b/y"}, complete=False)
    assert (loaded.settings.training.output_dir, loaded.settings.checkpoints.mirror_output) == (
        Path("s3/b"),
        "s3://b/y",
    )
