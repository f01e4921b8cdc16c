"""Write an exported pipeline as one file in its original layout, which other tools open."""

from __future__ import annotations

from pathlib import Path

from simpletuner.checkpoints.writing import as_bytes, write_safetensors
from simpletuner.models.single_file.ldm_layout import original_reads
from simpletuner.system.files.atomic import flush_to_disk, unfinished_path


def export_single_file(pipeline: Path, path: Path, family: str) -> None:
    """Write the tensors of a pipeline, one in memory at a time, and put the file in place when it is whole."""
    reads, hidden = original_reads(pipeline, family), unfinished_path(path)
    contents = {}
    for name, read in reads.items():
        tensor = read()
        contents[name] = (tensor.dtype, tuple(tensor.shape))
    # Larger elements first: so all data are aligned.
    contents = dict(sorted(contents.items(), key=lambda item: -item[1][0].itemsize))
    parts = (as_bytes(reads[name]()) for name in contents)
    write_safetensors(hidden, contents, {"format": "pt"}, parts)
    hidden.replace(path)
    flush_to_disk(path.parent)
