from __future__ import annotations

import json
from pathlib import Path

import pytest
from dataset_files import data_of, image, refusal

from simpletuner.data.config.dataset_file import MISSED, NO_EFFECT, OTHER_NAMES, REASONS, VALUES
from simpletuner.data.config.dataset_parsing import unused_keys
from simpletuner.data.config.dataset_types import PLACES, LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.config.embeds import EMBEDS
from simpletuner.data.config.places import latents_folder, text_folder
from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.declared.sections import Data, DatasetSettings, Model, Settings, Training


def test_from_flags_there_is_one_dataset_named_after_its_folder(tmp_path):
    data = Data(
        instance_data_dir=tmp_path / "holiday",
        repeats=2,
        resolution=512,
        caption_strategy="filename",
        cache_dir_vae=Path("lat"),
        cache_dir_text=Path("txt"),
    )
    (dataset,), (texts,) = load_datasets(data)
    assert (dataset.id, dataset.instance_data_dir) == ("holiday", tmp_path / "holiday")
    assert (dataset.repeats, dataset.resolution, dataset.caption_strategy) == (2, 512, "filename")
    assert (dataset.cache_dir_vae, texts.cache_dir) == (Path("lat"), Path("txt"))


def test_a_dataset_inherits_what_it_does_not_say(tmp_path):
    given = {
        "caption_strategy": "filename",
        "caption_encoding": "cp1252",
        "caption_lines": "first",
        "skip_uncaptioned": True,
        "instance_prompt": "a bear",
        "prepend_instance_prompt": True,
        "repeats": 3,
        "resolution": 768,
        "resolution_type": "pixel",
        "aspect_bucket_sizes": "nearest",
        "crop": True,
        "crop_style": "random",
        "crop_aspect": "preserve",
        "minimum_image_size": 100,
        "caption_dropout_probability": 0.3,
        "vae_batch_size": 2,
        "preserve_data_backend_cache": True,
        "max_workers": 3,
        "vae_cache_disable": True,
        "text_cache_disable": True,
        "vae_cache_ondemand": True,
        "text_cache_ondemand": True,
    }
    assert given.keys() == DatasetSettings.model_fields.keys()
    (plain, own), _ = load_datasets(
        data_of(tmp_path, image(), image(id="two", repeats=0, resolution=2, resolution_type="area"), **given)
    )
    assert {name: getattr(plain, name) for name in given} == given
    assert (own.repeats, own.resolution, own.resolution_type, own.crop) == (0, 2, "area", True)


def test_a_dataset_without_anything_said_has_the_defaults(tmp_path):
    (dataset,), (texts,) = load_datasets(data_of(tmp_path, image()))
    assert dataset == LocalImages(id="one", instance_data_dir=Path("pictures"))
    assert (texts.id, texts.cache_dir) == ("text", Path("{output_dir}/cache/text"))


def test_text_embeds_names_the_text_cache(tmp_path):
    text = {"id": "t", "type": "local", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/t"}
    datasets, (texts,) = load_datasets(data_of(tmp_path, text, image(), cache_dir_text=Path("weaker")))
    assert [dataset.id for dataset in datasets] == ["one"]
    assert texts.cache_dir == Path("cache/t")


def test_without_text_embeds_the_global_text_cache_holds(tmp_path):
    assert load_datasets(data_of(tmp_path, image(), cache_dir_text=Path("t")))[1][0].cache_dir == Path("t")


@pytest.mark.parametrize("key", ["disabled", "disable"])
def test_disabled_entries_are_left_out_whatever_they_hold(tmp_path, key):
    datasets, _ = load_datasets(data_of(tmp_path, {key: True, "nonsense": 1}, image(), image(**{key: True})))
    assert [dataset.id for dataset in datasets] == ["one"]


def test_nothing_but_disabled_entries_is_no_data(tmp_path):
    assert "names no dataset of images" in refusal(data_of(tmp_path, image(disabled=True)))
    assert "names no dataset of images" in refusal(data_of(tmp_path))


@pytest.mark.parametrize("key", sorted(REASONS))
def test_a_key_of_other_trainers_is_answered_with_the_reason(tmp_path, key):
    message = refusal(data_of(tmp_path, image(**{key: "x"})))
    value = "..." if key == "hf_token" else "'x'"
    assert message == f"{key} = {value} ({tmp_path}/multidatabackend.json:1, dataset `one`): {REASONS[key]}"


def test_what_is_off_or_happens_anyway_is_no_mistake_and_what_may_be_missed_is_one_line(tmp_path):
    off = dict.fromkeys(REASONS, False) | dict.fromkeys(MISSED, 0) | {"video": {}, "audio": None}
    on = dict.fromkeys(NO_EFFECT, "x")
    data = data_of(tmp_path, image(**off, **on, minimum_image_size=0, caption_strategy=None))
    (dataset,), _ = load_datasets(data)
    assert (dataset.minimum_image_size, dataset.caption_strategy, unused_keys(data)) == (None, "textfile", [])
    cleared = {"vae_cache_clear_each_epoch": True}
    (tmp_path / "d.json").write_text(json.dumps([image(**cleared), image(id="b", **cleared)], indent=1))
    warnings = unused_keys(Data(data_backend_config=tmp_path / "d.json"))
    assert warnings[0] == (
        "vae_cache_clear_each_epoch has no effect: random crops are chosen once per image "
        f"({tmp_path}/d.json:6, dataset `one` and 1 more)"
    )
    assert len(warnings) == 1


def test_keys_are_spelled_as_freely_as_settings_and_once(tmp_path):
    free = {"ID": "one", "--Instance-Dir": "pictures", "Repeats": 3, "minimum_resolution": 64, "Disable": "no"}
    (dataset,), _ = load_datasets(data_of(tmp_path, free))
    assert (dataset.instance_data_dir, dataset.repeats, dataset.minimum_image_size) == (Path("pictures"), 3, 64)
    assert "Repeats = 4" in (said := refusal(data_of(tmp_path, image(repeats=3, Repeats=4)))) and "keep one" in said


@pytest.mark.parametrize(("value", "left"), [("true", 0), ("Yes", 0), (1, 0), ("false", 1), ("no", 1), (0, 1)])
def test_disabled_means_what_it_says(tmp_path, value, left):
    assert len(load_datasets(data_of(tmp_path, image(id="two"), image(disabled=value)))[0]) == 1 + left


def test_names_in_braces_stand_for_the_run_in_cache_folders(tmp_path):
    text = {"id": "t", "dataset_type": "text_embeds", "cache_dir": "text/{model_family}/{id}"}
    data = data_of(
        tmp_path,
        text,
        image(cache_dir_vae="{output_dir}/vae/{model_family}/{id}"),
        image(id="two"),
        cache_dir_vae=Path("all/{model_family}"),
    )
    settings = Settings(model=Model(model_family="flux"), training=Training(output_dir=Path("out")), data=data)
    datasets, texts = load_datasets(data)
    folders = [latents_folder(dataset, settings) for dataset in datasets]
    assert folders == [Path("out/vae/flux/one"), Path("all/flux/two")]
    assert text_folder(texts[0], settings) == Path("text/flux/t")
    said = refusal(data_of(tmp_path, image(cache_dir_vae="{family}/{id}")))
    assert said.endswith("{family} stands for nothing here; {model_family} and {output_dir} and {id} do: write the "
                         "path itself")  # fmt: skip
    with pytest.raises(SettingsError, match="cache_dir_text = 'x/{id}' .flag.: {id} stands for nothing here"):
        load({"cache_dir_text": "x/{id}"}, complete=False, environment={})


def test_variables_of_the_environment_stand_in_every_path_but_not_in_an_id(tmp_path, monkeypatch):
    settings = Settings()
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.delenv("GONE", raising=False)
    there = data_of(tmp_path, image(cache_dir_vae="{env:PLACE}/{id}", instance_data_dir="{env:PLACE}/x"))
    [dataset] = load_datasets(there)[0]
    assert (dataset.instance_data_dir, latents_folder(dataset, settings)) == (tmp_path / "x", tmp_path / "one")
    assert "{env:GONE}: there is no GONE in the environment" in refusal(
        data_of(tmp_path, image(instance_data_dir="{env:GONE}/x"))
    )
    assert "an id cannot hold {env:NAME}" in refusal(data_of(tmp_path, image(id="{env:PLACE}")))
    flags = {"output_dir": "{env:PLACE}/out", "pretrained_model_name_or_path": "{env:PLACE}/model"}
    loaded = load(flags, complete=False, environment={}).settings
    assert loaded.training.output_dir == tmp_path / "out"
    assert loaded.model.pretrained_model_name_or_path == f"{tmp_path}/model"
    with pytest.raises(SettingsError, match="output_dir = 'x/{env:GONE}' .flag.: {env:GONE}: there is no GONE"):
        load({"output_dir": "x/{env:GONE}"}, complete=False, environment={})


def test_the_metadata_backend_that_we_are_is_accepted(tmp_path):
    assert load_datasets(data_of(tmp_path, image(metadata_backend="discovery")))[0][0].id == "one"


def test_an_unknown_key_names_the_nearest(tmp_path):
    message = refusal(data_of(tmp_path, image(resolutoin=512)))
    assert message.startswith("resolutoin (") and message.endswith("): unknown key; did you mean `resolution`?")


def test_all_mistakes_of_the_file_are_told_at_once_with_their_places(tmp_path):
    path = tmp_path / "d.json"
    path.write_text("""[
  {"id": "one", "instance_data_dir": "pictures",
   "slider_strength": 0.5, "crop_style": {"a": "{[,"},
   "crop": "perhaps"},
  {"id": "t", "dataset_type": "text_embeds"},
  {"id": "three"}, {"id": [4],
   "type": "memory", "instance_data_dir": "x"},
  {"id": "five", "type": "aws", "instance_data_dir": "x",
   "aws_endpoint_url": "host:9000", "aws_max_pool_connections": 0,
   "aws_secret_access_key": ["hidden"]},
  {"id": "six", "type": "aws", "aws_bucket_name": "a/b"},
  {"id": "seven", "type": "aws", "aws_bucket_name": "b",
   "aws_secret_access_key": "hidden"},
  {"id": "eight", "instance_data_dir": "x", "aws_access_key_id": "hidden"}
]""")
    lines = refusal(Data(data_backend_config=path)).splitlines()
    assert [line.strip().partition("):")[0] for line in lines] == [
        f"slider_strength = 0.5 ({path}:3, dataset `one`",
        f"crop = 'perhaps' ({path}:4, dataset `one`",
        f"""crop_style = {{"a": "{{[,"}} ({path}:3, dataset `one`""",
        f"cache_dir ({path}:5, dataset `t`",
        f"instance_data_dir ({path}:6, dataset `three`",
        f"id = [4] ({path}:6",
        f"type = 'memory' ({path}:7",
        f"instance_data_dir = 'x' ({path}:8, dataset `five`",
        f"aws_bucket_name ({path}:8, dataset `five`",
        f"aws_endpoint_url = 'host:9000' ({path}:9, dataset `five`",
        f"aws_secret_access_key = ... ({path}:10, dataset `five`",
        f"aws_max_pool_connections = 0 ({path}:9, dataset `five`",
        f"aws_bucket_name = 'a/b' ({path}:11, dataset `six`",
        f"aws_access_key_id ({path}:12, dataset `seven`",
        f"aws_access_key_id = ... ({path}:14, dataset `eight`",
    ]
    assert "hidden" not in "".join(lines)
    for sentence in (
        "only images of type local have it: change `type`, or leave it out",
        "use an address that begins with https:// or http://",
        "use the bucket's name alone; folders in it are aws_data_prefix",
        "is missing: it belongs to the other half of the key",
        "only images of type aws have it: change `type`, or leave it out",
    ):
        assert sum(line.endswith(sentence) for line in lines) == 1


def test_two_datasets_cannot_share_an_id(tmp_path):
    message = refusal(data_of(tmp_path, image(), image(), image(id="two")))
    assert message == f"id = 'one' ({tmp_path}/multidatabackend.json:1 and 1): two datasets share it"


def test_an_instance_prompt_is_asked_for_where_it_is_the_caption(tmp_path):
    assert "needs instance_prompt" in refusal(data_of(tmp_path, image(caption_strategy="instanceprompt")))
    (dataset,), _ = load_datasets(data_of(tmp_path, image(caption_strategy="instanceprompt"), instance_prompt="a bear"))
    assert dataset.instance_prompt == "a bear"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"id": }]', "d.json:1 does not parse: expecting value, column 9"),
        ('{"id": "x"}', "must hold a list of datasets"),
        ("[1]", "must hold a list of datasets"),
        ('[\n"\udcff"]', ":2 does not parse: it is not UTF-8"),
        ('[{"repeats": ' + "9" * 5000 + "}]", "a whole number has more than 4,300 digits"),
    ],
)
def test_a_file_that_is_no_list_of_datasets_is_refused(tmp_path, text, said):
    path = tmp_path / "d.json"
    path.write_text(text, errors="surrogateescape")
    assert said in refusal(Data(data_backend_config=path))


def test_a_dataset_file_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path}/no.json" in refusal(Data(data_backend_config=tmp_path / "no.json"))


@pytest.mark.parametrize(("key", "value"), [("repeats", -1), ("resolution", 0), ("resolution", -512)])
def test_numbers_have_the_bounds_that_flags_have(tmp_path, key, value):
    assert refusal(data_of(tmp_path, image(**{key: value}))).startswith(f"{key} = {value} (")


def test_choices_are_spelled_as_freely_as_in_flags(tmp_path):
    entry = image(caption_strategy="Instance-Prompt", instance_prompt="a bear", resolution_type="PIXEL-AREA")
    (dataset,), _ = load_datasets(data_of(tmp_path, entry))
    assert (dataset.caption_strategy, dataset.resolution_type) == ("instanceprompt", "pixel_area")


ORIGINAL_KEYS = Path(__file__).with_name("original_keys.txt").read_text().split()


def test_every_key_of_the_original_is_taken_or_answered_with_a_reason():
    taken = {
        *(key for kind in PLACES.values() for key in kind.model_fields),
        *(key for places in EMBEDS.values() for kind in places.values() for key in kind.model_fields),
        *OTHER_NAMES,
        "huggingface",  # a block whose keys are those of its dataset (dataset_file.py)
    }
    answered = REASONS | NO_EFFECT | MISSED
    assert set(ORIGINAL_KEYS) - taken - set(answered) == set()
    assert set(answered) & taken == set() and len(answered) == len(REASONS) + len(NO_EFFECT) + len(MISSED)
    assert set(answered) <= set(ORIGINAL_KEYS)
    assert all(len(reason) > 15 for reason in answered.values())


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in VALUES for value in VALUES[key]])
def test_every_value_of_the_original_is_answered_with_a_reason(tmp_path, key, value):
    message = refusal(data_of(tmp_path, image(**{key: value})))
    assert f"{key} = '{value}' (" in message and f"): {VALUES[key][value]}; use one of " in message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"type": "locl"},
            "type = 'locl' (d, dataset `one`): use one of local, aws, gcs, azure, csv, huggingface; did you mean `loc",
        ),
        (
            {"instance_data_dir": "gs://b/x"},
            "a dataset file takes type gcs, gcs_bucket_name and gcs_data_prefix",
        ),
        (
            {"instance_data_dir": "az://b/x"},
            "a dataset file takes type azure, azure_container_name and azure_data_prefix",
        ),
        ({"cache_dir_vae": "s3://b/x"}, "cache_dir_vae = 's3://b/x' (d, dataset `one`): is an address: name a path of"),
        ({"instance_data_dir": "https://b/x"}, "a web server lists no files: write the addresses of its images into"),
        (
            {"type": "https"},
            "a web server lists no files: write the addresses of its images into a table",
        ),
        ({"repeats": "often"}, "repeats = 'often' (d, dataset `one`): use a whole number of at least 0"),
        ({"resolution": 1e9}, "resolution=1e+09 (pixel_area) is too large: at most 16384x16384 px"),
        ({"resolution": 300, "resolution_type": "area"}, "resolution=300 (area) is too large"),
        ({"resolution": 0.5}, "resolution=0.5 (pixel_area) is less than 8x8 px; megapixels have resolution_type area"),
        ({"minimum_aspect_ratio": 2, "maximum_aspect_ratio": 1}, "it is above maximum_aspect_ratio"),
        ({"id": ["a"]}, 'id = ["a"] (d): use text in quotes'),
        ({"instance_data_dir": ["a"]}, 'instance_data_dir = ["a"] (d, dataset `one`): use a path in quotes'),
        ({"instance_data_dir": ""}, "instance_data_dir = '' (d, dataset `one`): a path cannot be empty"),
        ({"disabled": "perhaps"}, "disabled = 'perhaps' (d, dataset `one`): use true or false"),
    ],
)
def test_wrong_values_are_answered_in_our_words(tmp_path, values, said):
    message = refusal(data_of(tmp_path, image(**values))).replace(f"{tmp_path}/multidatabackend.json:1", "d")
    assert said in message and "Value error" not in message and "Input" not in message


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", "../x", "a/../../x", "/etc", "a//b", "a/", "./a", "a\nb", "a\x1b[2J", "\ud800", "x" * 256],
)
def test_an_id_that_leads_out_of_its_folder_or_cannot_be_printed_is_refused(tmp_path, name):
    assert refusal(data_of(tmp_path, image(id=name))).startswith("id = ")


def test_ids_below_the_folder_go_on_working_but_not_within_one_another(tmp_path):
    datasets, _ = load_datasets(data_of(tmp_path, *(image(id=name) for name in ("a/b", "a/c", "..a", "x" * 255, "熊"))))
    assert len(datasets) == 5
    message = refusal(data_of(tmp_path, image(id="a"), image(id="a/b"), image(id="ab")))
    assert message.endswith("the cache of dataset `a/b` would be inside that of `a`: rename one of them")
    own = image(id="a/b", cache_dir_vae="elsewhere")
    assert len(load_datasets(data_of(tmp_path, image(id="a"), own))[0]) == 2


def test_a_folder_with_any_name_is_a_dataset(tmp_path):
    folder = tmp_path / "a\nb\x1bc"
    folder.mkdir()
    (dataset,), _ = load_datasets(Data(instance_data_dir=folder))
    assert dataset.id == "a_b_c"
    for resolution in (1e6, 1e308):
        assert "too large" in refusal(Data(instance_data_dir=folder, resolution=resolution))


def test_datasets_name_their_caches_of_text_and_of_latents_and_one_text_cache_is_the_default(tmp_path):
    text = {"id": "t", "dataset_type": "text_embeds", "cache_dir": "t/{id}"}
    default = {**text, "id": "u", "default": True, "compress_cache": True}
    latents = {"id": "all", "dataset_type": "image_embeds", "cache_dir": "{output_dir}/{id}"}
    pair = image(text_embeds="t", image_embeds="all"), image(id="two")
    datasets, texts = load_datasets(data_of(tmp_path, text, *pair, default, latents))
    settings = Settings(training=Training(output_dir=Path("out")))
    assert [(each.id, each.compress_cache) for each in texts] == [("u", True), ("t", False)]
    assert [text_folder(each, settings) for each in texts] == [Path("t/u"), Path("t/t")]
    assert [dataset.text_embeds for dataset in datasets] == ["t", None]
    folders = [latents_folder(dataset, settings) for dataset in datasets]
    assert folders == [Path("out/all"), Path("out/cache/latents/two")]
    for said, *entries in (
        ("0 of 2 text caches have default true: one has", text, {**text, "id": "u"}),
        ("2 of 2 text caches have default true", default, {**default, "id": "v"}),
        ("0 of 1 text caches have default true", {**text, "default": False}),
        ("text_embeds = 'x'", text, image(id="b", text_embeds="x")),
        ("no dataset of dataset_type image_embeds has this id", image(id="b", image_embeds="x")),
        ("two datasets of type image_embeds share it", latents, latents),
        ("image_embeds names another folder", latents, image(id="b", image_embeds="all", cache_dir_vae="vae")),
    ):
        assert said in refusal(data_of(tmp_path, image(), *entries)), said


def test_a_mistake_in_an_entry_is_not_said_again_of_those_that_name_it(tmp_path):
    masks = image(id="m", dataset_type="conditioning", conditioning_type="masked")
    texts = {"id": "t", "dataset_type": "text_embeds", "cache_dir": "t", "default": "perhaps"}
    said = refusal(data_of(tmp_path, image(conditioning_data="m", text_embeds="t"), masks, texts))
    assert "conditioning_type = 'masked'" in said and "default = 'perhaps'" in said and "has this id" not in said


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[" * 100_000, "nested too deeply", ""),
        ('[\n {"id": "a",}\n]', "d.json:2 does not parse", "no comma before a closing bracket"),
        ('[\n {"id": "a,}" "b"}\n]', "d.json:2 does not parse", "a comma between entries"),
        ('[\n {"id": "a"},\n]', "d.json:2 does not parse", "no comma before a closing bracket"),
        ("[ // mine\n]", "column 3", "no comments"),
        ("[{'id': 1}]", "column 3", "double quotes"),
        ('[{"id": "a",\n "id": "b"}]', "d.json:2 does not parse: duplicate key `id`", "correct that line"),
    ],
)
def test_json_that_does_not_parse_says_where_and_what_is_usual(tmp_path, text, said, hint):
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_datasets(Data(data_backend_config=path))
    assert said in caught.value.message and hint in caught.value.hint


def test_caches_in_a_bucket_have_a_local_copy_below_output_dir_each(tmp_path):
    place = {"type": "aws", "aws_bucket_name": "b", "aws_data_prefix": "/cache/"}
    text = {"id": "same", "dataset_type": "text_embeds", **place}
    latents = {"id": "same", "dataset_type": "image_embeds", "cache_size_limit_gb": 2.5, **place}
    (one, two), (texts,) = load_datasets(data_of(tmp_path, image(image_embeds="same"), image(id="two"), text, latents))
    settings = Settings(training=Training(output_dir=Path("out")))
    assert latents_folder(one, settings) == Path("out/cache/image_embeds/same")
    assert text_folder(texts, settings) == Path("out/cache/text_embeds/same")
    assert one.latents_bucket is not None and two.latents_bucket is None
    assert (one.latents_bucket.cache_size_limit_gb, one.latents_bucket.address) == (2.5, "s3://b/cache")
    for said, entry in (
        ("only text_embeds of type local have it", {**text, "cache_dir": "here"}),
        ("only image_embeds of type aws, gcs, azure have it", {**latents, "type": "local", "cache_dir": "here"}),
        ("aws_bucket_name (", {**text, "aws_bucket_name": None}),
        ("its cache would not be in a folder of its own", {**text, "id": "../out"}),
        ("cache_size_limit_gb = 0 (", {**latents, "cache_size_limit_gb": 0}),
        ("aws_secret_access_key (", {**text, "aws_access_key_id": "k"}),
    ):
        assert said in refusal(data_of(tmp_path, image(), entry)), said
