"""A contact sheet of samples by their loss, over their captions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.errors import SimpleTunerError
from simpletuner.system.files.atomic import write_file
from simpletuner.system.numbers import count_noun
from simpletuner.tools.dataset.contact_sheets import CELL_PX, SheetCell, sheet
from simpletuner.tools.dataset.listing_diff import last_data, rows_of_table
from simpletuner.training.images.image_files import read_rgb
from simpletuner.training.metrics.sample_loss_scores import SampleScore

# Of an image that is decoded: 8192x8192 px take 200 MB.
MAX_PIXELS = 1 << 26


def draw_loss_sheet(output: Path, scores: Sequence[SampleScore], path: Path) -> None:
    """Write the sheet as a PNG; a sample that is no file of a local dataset any more has no image in it."""
    try:
        listing = last_data(output).listing
        wanted = {score.id for score in scores}
        captions = {row["id"]: row["caption"] for row in rows_of_table(listing.table) if row["id"] in wanted}
        places = listing.places
    except SimpleTunerError:
        captions, places = {}, {}
    cells = [cell_of_score(score, captions.get(score.id, ""), image_of(score.id, places)) for score in scores]
    content = io.BytesIO()
    title = f"{output.absolute().name}   {count_noun(len(scores), 'sample')} by loss over that of others"
    sheet(cells, title).save(content, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content.getvalue())


def cell_of_score(score: SampleScore, caption: str, image: Image.Image | str) -> SheetCell:
    words = f"x{score.ratio:.2f} z {score.z:+.1f}"
    return SheetCell(
        caption.partition("\n")[0] or score.id, f"{words}  {Path(score.id).name}", score.looks_wrong, image
    )


def image_of(sample_id: str, places: dict[str, str]) -> Image.Image | str:
    """Return an image in the size of a cell, or why it cannot be shown."""
    for dataset, folder in places.items():
        if sample_id.startswith(f"{dataset}/"):
            try:
                image = read_rgb(Path(folder) / sample_id.removeprefix(f"{dataset}/"), MAX_PIXELS)
            except DECODE_ERRORS as error:
                return str(error) or type(error).__name__
            image.thumbnail((CELL_PX, CELL_PX))
            return image
    return "is in no local dataset"
