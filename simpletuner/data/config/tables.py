"""The `parquet` block of a dataset: a table (Parquet, CSV or JSON lines) that holds captions or sizes of its files."""

from __future__ import annotations

from glob import has_magic
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.knob import Section
from simpletuner.settings.foreign.key_table import Refuses, Rule

FORMATS = {".parquet": "Parquet", ".csv": "CSV", ".jsonl": "JSON lines", ".json": "JSON lines"}
"""Names of table formats, by the suffix of the file."""
TABLE_STRATEGIES = ("parquet", "csv")
"""Values of caption_strategy that mean the table, whatever its format."""

ONLY_IMAGES = "not supported by this version: only sizes, lengths and captions"
BLOCK = "parquet"
TABLE_RULES: dict[str, Rule] = {
    f"{BLOCK}.{key}": Refuses(ONLY_IMAGES) for key in ("bbox_column", "audio_duration_column", "lyrics_column")
}


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def check_format(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        hint = f'; many, such as shards, are named together as "{path}/*.parquet"' if path.is_dir() else ""
        raise ValueError(f"use a file that ends with {', '.join(FORMATS)}{hint}")
    return path


def table_files(path: Path) -> list[Path]:
    """Return the files that a path names: itself, or those that its last part is a pattern of (`*`, `?`, `[0-9]`)."""
    return sorted(path.parent.glob(path.name)) if has_magic(path.name) and not path.exists() else [path]


class TableSettings(Section):
    """The path of the table, and the meaning of its columns."""

    path: Annotated[Path, AfterValidator(check_format)]
    """Of one file, or a pattern of the names of several: img2dataset writes a table for each of its shards."""
    filename_column: str = Field("filename", min_length=1)
    caption_column: Annotated[list[str], BeforeValidator(as_list)] = []
    """The first one that is not empty in a row gives its captions. None named: `caption`."""
    fallback_caption_column: str | None = None
    width_column: str | None = None
    height_column: str | None = None
    """None named: `width` and `height`, where the table has them as numbers."""
    num_frames_column: str | None = None
    fps_column: str | None = None
    """Of videos. None named: `num_frames` and `fps`, where the table has them as numbers."""
    identifier_includes_extension: bool | None = None
    """None: as more of the rows have a file."""

    @model_validator(mode="after")
    def check_sizes(self) -> TableSettings:
        if (self.width_column is None) != (self.height_column is None):
            missing = "height_column" if self.width_column else "width_column"
            raise PydanticCustomError(BLOCK, "{missing} is missing: both sides are needed", {"missing": missing})
        return self

    @property
    def caption_columns(self) -> list[str]:
        return [*self.caption_column, *([self.fallback_caption_column] if self.fallback_caption_column else [])]

    @property
    def size_columns(self) -> list[str]:
        return [self.width_column, self.height_column] if self.width_column and self.height_column else []


def check_table(table: TableSettings | None, caption_strategy: str, metadata_backend: str) -> None:
    """Raise PydanticCustomError, whose type is the key to change, where a dataset and its table do not fit."""
    captions = caption_strategy in TABLE_STRATEGIES
    if not table and (captions or metadata_backend == BLOCK):
        asks = f"caption_strategy {caption_strategy}" if captions else "metadata_backend parquet"
        raise PydanticCustomError(BLOCK, "is missing: {asks} reads the table that it describes", {"asks": asks})
    if table and not captions and metadata_backend != BLOCK:
        raise PydanticCustomError(BLOCK, "nothing reads it: set caption_strategy or metadata_backend to parquet")
