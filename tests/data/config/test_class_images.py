from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from dataset_files import data_of, image, refusal

from simpletuner.data.config.dataset_parts import with_class_words
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.scan.file_list import OtherFiles
from simpletuner.data.scan.scan import SCANNED, Scan
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.errors import DataError, SettingsError
from simpletuner.preparation.class_images import scan_of_class_images
from simpletuner.settings.declared.sections import Model, Settings, Validation

MADE = {"id": "class", "instance_data_dir": "made", "prior_images": 3, "prior_prompt": "a  dog"}
BY_CAPTIONS = {**MADE, "prior_prompt": None, "prior_captions_of": "one", "class_words": {"sks dog": "dog"}}


def test_class_words_replace_whole_trigger_words_the_longest_first():
    words = {"sks": "thing", "sks dog": "dog", "ohwx": "cat"}
    replaced = with_class_words("SKS  dog and ohwx, an sks at skspark", words)
    assert replaced == "dog and cat, an thing at skspark"


def test_captions_of_class_images_are_their_prompts_whatever_the_settings_say(tmp_path):
    data = data_of(tmp_path, image(), image(**MADE), caption_strategy="instanceprompt", instance_prompt="a sks dog")
    one, made = load_datasets(data)[0]
    assert (one.caption_strategy, made.caption_strategy, made.prior_prompt) == (
        "instanceprompt",
        "textfile",
        ("a dog",),
    )
    assert load_datasets(data_of(tmp_path, image(prior_images=0)))[0][0].prior_images is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prior_images": None}, "is missing: prior_prompt belongs to it"),
        ({"prior_prompt": None}, "takes one of prior_prompt and prior_captions_of"),
        ({"prior_captions_of": "one", "class_words": {"a": "b"}}, "takes one of prior_prompt and prior_captions_of"),
        ({"class_words": {"a": "b"}}, "belong together"),
        ({"prior_prompt": [" "]}, "use a prompt, or a list of them"),
        ({"prior_prompt": 3}, "use a prompt, or a list of them"),
        ({"prior_images": 1.5}, "use"),
        ({"prior_images": 100_001}, "use"),
        ({"prior_guidance": -1}, "use"),
        ({"caption_strategy": "filename"}, "captions of class images are their prompts: leave it out"),
        ({"prepend_instance_prompt": True}, "captions of class images are their prompts: leave it out"),
        ({"dataset_type": "video"}, "class images are of type local and dataset_type image"),
        ({**BY_CAPTIONS, "class_words": {" ": "b"}}, "use the class word of each trigger word"),
        ({**BY_CAPTIONS, "class_words": ["b"]}, "use the class word of each trigger word"),
        ({**BY_CAPTIONS, "prior_captions_of": "class"}, "no dataset of images with captions"),
        ({**BY_CAPTIONS, "prior_captions_of": "o1e"}, "did you mean `one`?"),
        ({"instance_data_dir": "pictures"}, "class images would be taken for images of dataset `one`"),
        ({"instance_data_dir": "pictures/of/dogs"}, "class images would be taken for images of dataset `one`"),
    ],
)
def test_mistakes_are_named_at_their_key(changes, said, tmp_path):
    assert said in refusal(data_of(tmp_path, image(), image(**{**MADE, **changes})))


def scan_of(one: LocalImages, *captions: str) -> Scan:
    row = {
        "size_bytes": 1,
        "version": "1",
        "problem": "",
        "caption_version": "",
        "width": 64,
        "height": 64,
        "frames": 1,
    }
    row |= {"fps": 0.0, "animated": False, "caption_problem": "", "caption_form": ""}
    rows = [{**row, "name": f"{number}.png", "captions": [each]} for number, each in enumerate(captions)]
    return Scan(one, LocalStorage(one.instance_data_dir), pa.Table.from_pylist(rows, SCANNED), OtherFiles())


Names = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def names(tmp_path) -> Names:
    """Return a function of settings, changes of the class images and captions: names and prompts of the images."""
    (one, made), _ = load_datasets(data_of(tmp_path, image(), image(**BY_CAPTIONS)))

    def names(settings: Settings, changes: dict, *captions: str) -> list[tuple[str, str]]:
        changed = made.model_copy(update=changes)
        table = scan_of_class_images(settings, changed, {"one": scan_of(one, *captions)}).table
        return list(zip(table["name"].to_pylist(), [each[0] for each in table["captions"].to_pylist()], strict=True))

    return names


def test_names_change_with_what_an_image_is_made_by_and_with_nothing_else(names):
    settings = Settings(model=Model(model_family="sdxl"))
    first = names(settings, {}, "a sks dog", "two of sks dog")
    assert [caption for _, caption in first] == ["a dog", "two of dog", "a dog"]
    assert [name[:7] for name, _ in first] == ["000000-", "000001-", "000002-"]
    assert first == names(settings, {"repeats": 4, "prior_seed": 42}, "a sks dog", "two of sks dog")
    one_changed = names(settings, {}, "a sks dog", "three of sks dog")
    assert [old == new for old, new in zip(first, one_changed, strict=True)] == [True, False, True]
    for update in ({"prior_seed": 1}, {"prior_num_inference_steps": 3}, {"prior_guidance": 1.0}, {"resolution": 512}):
        changed = names(settings, update, "a sks dog", "two of sks dog")
        assert not {*first} & {*changed}, update
    negative = settings.model_copy(update={"validation": Validation(validation_negative_prompt="blurry")})
    assert not {*first} & {*names(negative, {}, "a sks dog", "two of sks dog")}
    assert [caption for _, caption in names(settings, {})] == ["dog"] * 3, (
        "what is wrong with no captions is said later"
    )
    with pytest.raises(DataError, match=r"none of 1 caption of `one` has 'sks dog', such as 'a cat'"):
        names(settings, {}, "a cat")
    data = settings.data.model_copy(update={"aspect_bucket_alignment": 9})
    with pytest.raises(SettingsError, match="dataset `class`: resolution"):
        names(settings.model_copy(update={"data": data}), {}, "sks dog")
