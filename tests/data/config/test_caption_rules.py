from __future__ import annotations

from pathlib import Path

import pytest
from dataset_files import data_of, image, refusal
from hypothesis import given
from hypothesis import strategies as st

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.scan.captions import captions_of


def captions(lines: list[str], **values) -> tuple[str, ...]:
    return captions_of(LocalImages(id="d", instance_data_dir=Path(), **values), "a_b.png", lines)


@pytest.mark.parametrize(
    ("rule", "caption", "left"),
    [
        ("art", "party art, smart art.", "party , smart ."),
        ("a photo.", "a photo. a photo of it", "a photo of it"),
        ("photo of", "a photo of a cat, photo off", "a a cat, photo off"),
        (r"^an? (photo|image) of ", "a photo of an image of x", "an image of x"),
        (r"\d+k?", "8k, 4k cat 12", ", cat"),
        ("s/cat/dog", "cat, cats", "dog, dogs"),
        (r"s/(\w+) cat/\1 dog/i", "a red CAT", "a red dog"),
        (r"s/1\/2/half/g", "1/2 cat", "half cat"),
        ("s/, .*//", "cat, masterpiece, 8k", "cat"),
        (".*", "cat", ""),
    ],
)
def test_rules_remove_words_and_matches_and_replace(rule, caption, left):
    assert captions([caption, "other"], caption_filter_list=[rule])[0] == left


def test_rules_apply_in_their_order_from_a_list_a_text_file_or_json(tmp_path):
    rules = ["s/cat/photo/", "", "photo"]
    (tmp_path / "rules.txt").write_text("\n".join(rules), encoding="utf-8-sig")
    (tmp_path / "rules.json").write_text('["s/cat/photo/", "photo"]')
    for given_as in (rules, str(tmp_path / "rules.txt"), str(tmp_path / "rules.json")):
        (dataset,), _ = load_datasets(data_of(tmp_path, image(caption_filter_list=given_as)))
        assert captions_of(dataset, "x.png", ["a cat, photograph"]) == ("a , photograph",)
        assert dataset.caption_filter_list == ("s/cat/photo/", "photo")
    for off in ("", [], False, None):
        assert load_datasets(data_of(tmp_path, image(caption_filter_list=off)))[0][0].caption_filter_list == ()
    assert captions(["a cat"], caption_strategy="filename", caption_filter_list=["a"]) == ("b",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("photo\n[a-\n", "r.txt:2 is not a regular expression: unterminated character set"),
        (r"s/a/\2/", "r.txt:1 is not a regular expression: invalid group reference 2"),
        (r"s/a/\g<x>/", "r.txt:1 is not a regular expression: unknown group name"),
        ("s/a", "r.txt:1 must be s/expression/replacement/"),
        ("s//b/", "r.txt:1 must be s/expression/replacement/"),
    ],
)
def test_a_bad_rule_is_named_with_its_line(tmp_path, text, said):
    (tmp_path / "r.txt").write_text(text)
    message = refusal(data_of(tmp_path, image(caption_filter_list=str(tmp_path / "r.txt"))))
    assert f"{tmp_path}/{said}" in message and "multidatabackend.json:1, dataset `one`" in message


def test_a_rule_may_hold_what_only_python_takes_for_a_line_end(tmp_path):
    (tmp_path / "r.txt").write_bytes("s/\u2028/ /\r\ns/\x0c//\rlast".encode())
    (dataset,), _ = load_datasets(data_of(tmp_path, image(caption_filter_list=str(tmp_path / "r.txt"))))
    assert captions_of(dataset, "x.png", ["a\u2028b\x0cc last"]) == ("a bc",)


def test_rules_that_cannot_be_read_are_mistakes(tmp_path):
    (tmp_path / "r.json").write_text("{")
    (tmp_path / "o.json").write_text("{}")
    (tmp_path / "l.txt").write_bytes(b"\xff")
    for value, said in (
        (str(tmp_path / "no.txt"), "cannot read"),
        (str(tmp_path / "r.json"), "is not JSON; write one rule per line"),
        (str(tmp_path / "o.json"), "must hold a list of rules"),
        (str(tmp_path / "l.txt"), "is not UTF-8"),
        ([1], "rule 1 must be a text"),
        (["a", "(b"], "rule 2 is not a regular expression: missing )"),
    ):
        assert said in refusal(data_of(tmp_path, image(caption_filter_list=value)))


TAGS = st.lists(st.text("abc ", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=6)


@given(TAGS, st.integers(1, 5), st.integers(0, 3), st.integers(0, 4), st.booleans())
def test_shuffles_keep_all_tags_the_first_ones_in_place_and_are_the_same_again(tags, count, seed, start, original):
    values = {"count": count, "seed": seed, "position_start": start, "include_original": original}
    made = captions([", ".join(tags)], caption_shuffle={"enable": True, **values})
    assert made == captions([", ".join(tags)], caption_shuffle={"enable": True, **values})
    assert 1 <= len(made) <= count + original and len(set(made)) == len(made)
    assert made[0] == ", ".join(tags) or not original
    for each in made:
        assert each.split(", ")[:start] == tags[:start] and sorted(each.split(", ")) == sorted(tags)


def test_shuffles_split_as_asked_reach_all_orders_and_leave_the_phrase_in_front():
    shuffle = {"enable": True, "count": 60}
    made = captions(["a, b,c"], caption_shuffle=shuffle, prepend_instance_prompt=True, instance_prompt="sks")
    assert set(made) == {
        f"sks {text}" for text in ("a, b,c", "a, b, c", "a, c, b", "b, a, c", "b, c, a", "c, a, b", "c, b, a")
    }
    assert set(captions(["a  b"], caption_shuffle={**shuffle, "split_on": "Space"})) == {"a  b", "a b", "b a"}
    assert set(captions(["A b. C."], caption_shuffle={**shuffle, "split_on": "period"})) == {"A b. C.", "C. A b."}
    assert captions(["a, b"], caption_shuffle={"count": 5}) == ("a, b",)
    for text in ('{"subject": "a dog, a cat", "style": "oil, dark"}', '["a, b", "c. d"]', '{\n"a": 1,\n"b": [2, 3]\n}'):
        every = ({**shuffle, "split_on": kind} for kind in ("comma", "space", "period"))
        assert all(captions([text], caption_shuffle=each) == (text,) for each in every), "JSON is one value"
    assert len(captions(['{"a": 1, "b'], caption_shuffle=shuffle)) == 2, "and tags may have brackets"
    one, other = (captions(["a, b, c, d"], caption_shuffle={**shuffle, "count": 1, "seed": seed}) for seed in (0, 1))
    assert one != other


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("on", 'use a JSON object such as {"enable": true, "count": 3}'),
        ({"enabled": True}, "unknown key `enabled`; use enable, count, seed"),
        ({"count": 0}, "count: use a whole number of at least 1"),
        ({"split_on": "dash"}, "split_on: use one of comma, space, period"),
        ({"enable": "perhaps"}, "enable: use true or false"),
    ],
)
def test_wrong_keys_of_a_shuffle_are_mistakes(tmp_path, value, said):
    assert said in refusal(data_of(tmp_path, image(caption_shuffle=value)))


def test_a_text_file_is_one_caption_or_the_phrase_alone(tmp_path):
    assert captions(["one", "two"], disable_multiline_split=True) == ("one\ntwo",)
    assert captions([], disable_multiline_split=True) == ()
    assert captions(["one", "two"], disable_multiline_split=False, caption_lines="first") == ("one", "two")
    for key, value in (("disable_multiline_split", "yes"), ("caption_lines", "One")):
        (dataset,), _ = load_datasets(data_of(tmp_path, image(**{key: value})))
        assert dataset.caption_lines == "one"
    only = image(only_instance_prompt="yes", caption_strategy="textfile", instance_prompt="sks")
    (dataset,), _ = load_datasets(data_of(tmp_path, only))
    assert captions_of(dataset, "x.png", ["a", "b"]) == ("sks",)
    said = refusal(data_of(tmp_path, image(only_instance_prompt=True)))
    assert "only_instance_prompt needs instance_prompt" in said
