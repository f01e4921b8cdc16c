"""Captions and sizes from tables: Parquet, CSV and JSON lines."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tabled import Rows, add_images, dataset_file, scan_table, write_rows

from simpletuner.caches.latents import decode_image
from simpletuner.data.config.dataset_parts import TableSettings
from simpletuner.data.config.datasets import load_datasets
from simpletuner.errors import DataError, SettingsError
from simpletuner.settings.declared.sections import Data

NAMES = ("a.png", "b.v2.jpeg", "in/c.webp", "in/deep/d.JPG")
CAPTION = {"caption_column": "caption", "identifier_includes_extension": True}
SIZES = {"width_column": "w", "height_column": "h"}
ALL = CAPTION | SIZES


def rows_of(*names: str) -> list[dict]:
    return [
        {"file": name, "caption": f'caption {number}, "quoted"\nand more', "w": 64 + 16 * number, "h": 64}
        for number, name in enumerate(names)
    ]


@pytest.fixture
def images(tmp_path) -> Path:
    return add_images(tmp_path / "images", *NAMES)


def scanned(images: Path, rows: Rows, columns: dict = ALL, suffix: str = ".parquet", **values):
    both = {"caption_strategy": "parquet", "metadata_backend": "parquet"} | values
    return scan_table(images, write_rows(images.parent / f"table{suffix}", rows), columns, **both)


def error_of(images: Path, rows: Rows, columns: dict = ALL, suffix: str = ".parquet", **values) -> str:
    with pytest.raises(DataError) as caught:
        scanned(images, rows, columns, suffix, **values)
    return f"{caught.value.message}|{caught.value.hint}"


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".json"])
def test_every_format_gives_captions_and_sizes_without_opening_an_image(images, suffix):
    rows = rows_of(*reversed(NAMES))
    for number, row in enumerate(reversed(rows)):
        row["w"] = 64 + 16 * number
    listed = scanned(images, rows, CAPTION, suffix, metadata_backend="discovery")
    assert len(listed.opened) == 4
    again = scanned(images, rows, ALL, suffix)
    assert again.opened == [] and again.warnings == listed.warnings == []
    assert list(again.found.samples) == [
        type(sample)(**{**vars_of(sample), "storage": again.found.samples[0].storage})
        for sample in listed.found.samples
    ]
    assert again.captions["in/deep/d.JPG"] == ('caption 0, "quoted"\nand more',)


def vars_of(sample) -> dict:
    return {name: getattr(sample, name) for name in type(sample).__slots__}


@pytest.mark.parametrize("identifiers", [("a", "b.v2", "in/c", "in/deep/d"), ("a", "b.v2", "c", "d")])
def test_a_name_may_be_without_its_folder_and_its_suffix(images, identifiers):
    found = scanned(images, rows_of(*identifiers), ALL | {"identifier_includes_extension": False})
    assert [captions[0][:9] for captions in found.captions.values()] == [f"caption {number}" for number in range(4)]


@pytest.mark.parametrize("is_absolute", [True, False])
def test_all_names_may_have_the_folder_in_front_of_them(images, is_absolute, monkeypatch):
    monkeypatch.chdir(images.parent)
    folder = images.absolute() if is_absolute else Path(images.name)
    found = scan_table(
        Path(images.name),
        write_rows(Path("table.jsonl"), rows_of(*(f"{folder}/{name}" for name in NAMES))),
        ALL,
        caption_strategy="parquet",
        metadata_backend="parquet",
    )
    assert list(found.captions) == list(NAMES) and found.warnings == []
    add_images(images / images.name, "a.png")  # of which the name is that of images/a.png with its folder
    found = scanned(images, rows_of(f"{images.name}/a.png"))
    assert list(found.captions) == [f"{images.name}/a.png"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_numbers_are_names_and_keep_their_zeros_where_they_are_texts(tmp_path, suffix):
    images = add_images(tmp_path / "images", "7.png", "0042.png")
    rows = [{"file": 7, "caption": "seven"}]
    columns = {"caption_column": "caption"}
    assert scanned(images, rows, columns, suffix).captions == {"7.png": ("seven",)}
    csv = write_rows(tmp_path / "t.csv", [{"file": "0042", "caption": "42"}, {"file": "7", "caption": "7"}])
    found = scan_table(images, csv, columns, caption_strategy="csv")
    assert found.captions == {"0042.png": ("42",), "7.png": ("7",)}


def test_captions_come_from_the_first_column_that_has_one_and_a_list_gives_several(images):
    rows = [
        {"file": NAMES[0], "long": [" one ", "", "two", None], "tags": "x", "last": "y"},
        {"file": NAMES[1], "long": [], "tags": " tags ", "last": "y"},
        {"file": NAMES[2], "long": None, "tags": None, "last": "last"},
        {"file": NAMES[3], "long": [""], "tags": " \n", "last": "last"},
    ]
    columns = {"caption_column": ["long", "tags"], "fallback_caption_column": "last"}
    found = scanned(images, rows, columns | {"identifier_includes_extension": True})
    assert list(found.captions.values()) == [("one", "two"), ("tags",), ("last",), ("last",)]
    prompt = {"instance_prompt": "sks", "prepend_instance_prompt": True}
    found = scanned(images, rows, columns | {"identifier_includes_extension": True}, **prompt)
    assert found.captions[NAMES[0]] == ("sks one", "sks two")


def test_what_does_not_fit_is_counted_and_named_once(images):
    rows = [*rows_of(NAMES[0], NAMES[1], "in/gone.png"), {**rows_of(NAMES[0])[0], "caption": "again"}]
    rows[1]["w"] = 0
    rows += rows_of(*(f"{number}.png" for number in range(30)))
    found = scanned(images, rows)
    assert found.opened == [NAMES[1]] and list(found.captions) == [*NAMES[:2]]
    assert found.captions[NAMES[0]] != ("again",)
    heads = [warning.partition("\n")[0] for warning in found.warnings]
    table = f"the table {images.parent}/table.parquet"
    assert heads == [
        f"dataset `d`: 1 row of {table} for an image that has one: the first one counts:",
        f"dataset `d`: 31 rows of {table} without an image:",
        f"dataset `d`: 2 images without a row in {table}: left out:",
        f"dataset `d`: 1 image without a usable size in {table}: read from the file:",
    ]
    lines = found.warnings[1].splitlines()
    assert lines[1] == "  in/gone.png" and len(lines) == 22 and lines[-1] == "  and 11 more"
    assert found.warnings[2].splitlines()[1:] == ["  in/c.webp", "  in/deep/d.JPG"]
    again = scanned(images, rows)
    assert again.warnings == found.warnings and again.opened == []


def test_sizes_that_differ_are_named_where_both_are_known(images):
    rows = rows_of(*NAMES)
    rows[2]["w"], rows[3]["h"] = 1000, None
    found = scanned(images, rows, metadata_backend="discovery")
    assert [sample.geometry.original.size for sample in found.found.samples] == [(64 + 16 * n, 64) for n in range(4)]
    (warning,) = found.warnings
    assert warning.endswith("/table.parquet: the file counts:\n  in/c.webp") and ": 1 image with another" in warning


def test_a_wrong_size_of_the_table_is_noticed_when_the_image_is_decoded(images):
    rows = rows_of(*NAMES)
    rows[1]["w"], rows[1]["h"] = 64, 80
    decoded = [decode_image(sample) for sample in scanned(images, rows).found.samples]
    assert decoded[1] == "has 80x64 px, not 64x80: the table is wrong, or the file changed"
    assert [type(each) is str for each in decoded] == [False, True, False, False]


def test_an_image_without_a_caption_ends_the_run(images):
    rows = rows_of(*NAMES)
    rows[2]["caption"] = " "
    table = f"{images.parent}/table.parquet"
    said = error_of(images, rows)
    assert said.startswith(f"dataset `d`: 1 image without a caption in the table {table}:\n  in/c.webp|write captions")
    said = error_of(images, rows_of(*NAMES[:3]), metadata_backend="discovery")
    assert said.startswith(f"dataset `d`: 1 image without a caption in the table {table}:\n  in/deep/d.JPG|")


def test_other_captions_go_with_sizes_from_a_table(images):
    named = scanned(
        images, rows_of(*NAMES), SIZES | {"identifier_includes_extension": True}, caption_strategy="filename"
    )
    assert named.opened == [] and named.captions["in/c.webp"] == ("c",)
    for name in NAMES:
        (images / name).with_suffix(".txt").write_text("from a file")
    rows = rows_of(*NAMES[:3])
    rows[0]["h"] = 1
    text = scanned(images, rows, caption_strategy="textfile")
    assert len(text.opened) == 4 and list(text.captions.values()) == [("from a file",)] * 3
    assert [warning.splitlines()[1:] for warning in text.warnings] == [["  in/deep/d.JPG"], ["  a.png"]]
    assert len(scanned(images, rows_of(*NAMES), caption_strategy="textfile").captions) == 4


def test_a_changed_table_is_noticed_and_headers_are_not_read_again(images):
    rows = rows_of(*NAMES)
    discovery = {"metadata_backend": "discovery"}
    assert len(scanned(images, rows, CAPTION, **discovery).opened) == 4
    rows[0]["caption"] = "another"
    for columns in (CAPTION, ALL):
        changed = scanned(images, rows, columns, **discovery)
        assert changed.opened == [] and changed.captions[NAMES[0]] == ("another",)
    rows[1]["w"] = 640
    assert scanned(images, rows).found.samples[1].geometry.original.size == (640, 64)
    rows[1]["w"] = None
    assert scanned(images, rows).found.samples[1].geometry.original.size == (80, 64)
    kept = scanned(images, rows, preserve_data_backend_cache=True)
    rows[0]["caption"] = "unseen"
    assert scanned(images, rows, preserve_data_backend_cache=True).captions == kept.captions
    other = scanned(images, rows, ALL | {"caption_column": "file"}, preserve_data_backend_cache=True)
    assert other.captions[NAMES[0]] == (NAMES[0],)


def test_the_table_may_be_among_the_images(images):
    table = write_rows(images / "table.parquet", rows_of(*NAMES))
    assert scan_table(images, table, ALL, caption_strategy="parquet").warnings == []


def test_columns_are_named_and_have_types(images):
    rows = rows_of(*NAMES)
    table = f"dataset `d`: the table {images.parent}/table"
    for suffix in (".parquet", ".csv", ".jsonl"):
        assert error_of(images, rows, ALL | {"caption_column": "captoin"}, suffix) == (
            f"{table}{suffix} has no column `captoin`; did you mean `caption`?"
            "|correct parquet.caption_column; its columns: `file`, `caption`, `w`, `h`"
        )
    assert error_of(images, rows, ALL | {"fallback_caption_column": "w"}).startswith(
        f"{table}.parquet has int64 in column `w`, not text"
    )
    assert error_of(images, rows, ALL | {"width_column": "file"}).startswith(
        f"{table}.parquet has string in column `file`, not whole numbers"
    )
    assert "not text" in error_of(images, [{"file": 1.5, "caption": "x"}], CAPTION)
    twice = pa.table([["a"], ["b"], ["c"]], ["file", "caption", "caption"])
    pq.write_table(twice, images.parent / "twice.parquet")
    with pytest.raises(DataError, match="has two columns `caption`"):
        scan_table(images, images.parent / "twice.parquet", CAPTION, caption_strategy="parquet")


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_columns_have_names_by_default_and_sizes_count_where_they_are_numbers(images, suffix):
    rows = [
        {"filename": name, "width": 64 + 16 * number, "height": 64, "caption": f"of {name}"}
        for number, name in enumerate(NAMES)
    ]
    table, both = images.parent / f"table{suffix}", {"caption_strategy": "parquet", "metadata_backend": "parquet"}
    default = {"filename_column": None}
    found = scan_table(images, write_rows(table, rows), default, **both)
    assert found.opened == [] and found.captions == {name: (f"of {name}",) for name in NAMES}
    worded = [row | {"width": "wide"} for row in rows]
    assert len(scan_table(images, write_rows(table, worded), default, **both).opened) == 4
    sizeless = [{"filename": row["filename"], "text": row["caption"]} for row in rows]
    write_rows(table, sizeless)
    with pytest.raises(DataError, match="has no column `caption`") as caught:
        scan_table(images, table, default, **both)
    assert caught.value.hint == "correct parquet.caption_column; its columns: `filename`, `text`"
    found = scan_table(images, table, default | {"caption_column": "text"}, **both)
    assert found.warnings == [] and len(found.captions) == 4
    write_rows(table, [row | {"text": "another"} for row in sizeless])
    found = scan_table(images, table, default | {"caption_column": "text"}, **both)
    assert found.opened == [] and found.captions[NAMES[0]] == ("another",), "headers that were read stay known"


@pytest.mark.parametrize("cut", [str, lambda name: name.rpartition(".")[0], lambda name: name.rpartition("/")[2]])
def test_suffixes_are_recognized_by_which_rows_have_a_file(images, cut):
    found = scanned(
        images, rows_of(*map(cut, NAMES)), {"caption_column": "caption", "width_column": "w", "height_column": "h"}
    )
    assert found.opened == [] and found.warnings == [] and len(found.captions) == 4


@pytest.mark.parametrize("backend", ["parquet", "discovery"])
def test_rows_of_which_none_fits_are_named_with_the_key_that_decides(images, backend):
    rows = rows_of(*(f"../elsewhere/{name}" for name in NAMES))
    said = error_of(images, rows, metadata_backend=backend)
    table = images.parent / "table.parquet"
    assert said.startswith(
        f"dataset `d`: the table {table} has 4 rows, the first `../elsewhere/{NAMES[0]}`, "
        f"but none of 4 images, the first `{min(NAMES)}`, in {images}|parquet.filename_column is `file`: it has"
    )


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_texts_may_have_any_type_of_arrow(images, dtype):
    texts = pa.array(NAMES).cast(pa.string()).cast(dtype)
    sides = [pa.array([64, 80, 96, 112]).cast(pa.float32()), pa.array([64] * 4, pa.uint16())]
    pq.write_table(pa.table([texts, texts, *sides], ["file", "caption", "w", "h"]), images.parent / "t.parquet")
    both = {"caption_strategy": "parquet", "metadata_backend": "parquet"}
    found = scan_table(images, images.parent / "t.parquet", ALL, **both)
    assert found.captions == {name: (name,) for name in NAMES} and found.opened == []


def test_tables_of_shards_are_one_and_a_change_of_any_is_noticed(images):
    """As img2dataset writes them, one per shard."""
    rows = rows_of(*NAMES)
    for number, part in enumerate((rows[:1], rows[1:])):
        write_rows(images.parent / f"0000{number}.parquet", part)
    pattern = images.parent / "0000*.parquet"
    both = scan_table(images, pattern, CAPTION, caption_strategy="csv", metadata_backend="csv")
    one = scanned(images, rows, CAPTION)
    assert both.captions == one.captions and both.warnings == one.warnings == []
    write_rows(images.parent / "00001.parquet", [{**each, "caption": "other"} for each in rows[1:]])
    again = scan_table(images, pattern, CAPTION, caption_strategy="parquet", metadata_backend="parquet")
    assert again.captions["in/deep/d.JPG"] == ("other",) and again.captions["a.png"] == both.captions["a.png"]
    with pytest.raises(DataError, match=r"none\*.parquet names no file"):
        scan_table(images, images.parent / "none*.parquet", CAPTION, caption_strategy="parquet")
    with pytest.raises(ValueError, match=r'named together as ".*/\*.parquet"'):
        TableSettings(path=images)


def test_a_table_that_is_missing_or_damaged_is_named(images):
    path = images.parent / "table.parquet"
    assert "not text" not in error_of(images, [{"caption": "x"}])
    for content in (b"", b"PAR1", b"no table"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"^dataset `d`: the table {path} cannot be read as Parquet: "):
            scan_table(images, path, ALL, caption_strategy="parquet")
    path.unlink()
    with pytest.raises(DataError, match=f"^dataset `d`: the table {path} does not exist$"):
        scan_table(images, path, ALL, caption_strategy="parquet")
    path.mkdir()
    with pytest.raises(DataError, match="cannot be read as Parquet: is a directory"):
        scan_table(images, path, ALL, caption_strategy="parquet")
    for name, content in (
        ("t.csv", b"file,caption\na"),
        ("t.jsonl", b'[{"file": 1}]'),
        ("t.csv", b'file,caption\na,"\xff"'),
    ):
        (images.parent / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as") as caught:
            scan_table(images, images.parent / name, CAPTION, caption_strategy="csv")
        assert "first line" in caught.value.hint or "one JSON object per line" in caught.value.hint


@pytest.mark.parametrize(
    ("table", "values", "said"),
    [
        ({}, {"caption_strategy": "csv"}, "parquet: is missing: caption_strategy csv reads the table"),
        ({}, {"metadata_backend": "parquet"}, "parquet: is missing: metadata_backend parquet reads the table"),
        ({"path": "t.parquet"}, {}, "nothing reads it: set caption_strategy or metadata_backend to parquet"),
        ({"path": "t.txt"}, {}, "parquet.path = 't.txt': use a file that ends with .parquet, .csv, .jsonl, .json"),
        ({"path": ""}, {}, "parquet.path = '': a path cannot be empty"),
        ({"path": "t.csv", "widht_column": "w"}, {}, "parquet.widht_column: unknown key; did you mean `parquet.width"),
        ({"path": "t.csv", "width_column": "w"}, {}, "height_column is missing: both sides are needed"),
        ({"path": "t.csv", "caption_column": [1]}, {}, "parquet.caption_column = [1]: use text or a list of texts"),
        ({"path": "t.csv", "bbox_column": "f"}, {}, "parquet.bbox_column = 'f': not supported by this version"),
        ({"filename_column": "f"}, {}, "parquet.path: is missing"),
    ],
)  # fmt: skip
def test_mistakes_in_the_block_have_a_place(tmp_path, table, values, said):
    block = {"parquet": {"filename_column": "f", **table}} if table else {}
    path = dataset_file(tmp_path / "images", None, {}, **block, **values)
    with pytest.raises(SettingsError) as caught:
        load_datasets(Data(data_backend_config=path))
    assert said in caught.value.message.replace(f" ({path}:1, dataset `d`)", "")
    assert f"{path}:1, dataset `d`" in caught.value.message
