"""Contact sheets: one PNG per bucket, the cropped parts of its images darkened, the most cropped first; and
one of samples by their loss."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.data.samples.buckets import bucket_shapes
from simpletuner.data.samples.dataset_summary import MUCH_ENLARGED, cropped_away
from simpletuner.data.samples.samples import DatasetSamples, Sample
from simpletuner.errors import SimpleTunerError
from simpletuner.runs.data_listing import last_data, rows_of_table
from simpletuner.runs.images import SHOWN_PIXELS, read_rgb
from simpletuner.runs.sample_loss_scores import SampleScore
from simpletuner.system.files.atomic import write_file
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.threads import run_bounded
from simpletuner.training.validation.image_grid import Typesetter

MAX_IMAGES = 48
COLUMNS = 8
CELL_PX = 176
GAP_PX = 10
TEXT_PX = 34
HEAD_PX = 30
DARKNESS = 0.62
INK = "#222222"
FAINT = "#777777"
WARNING = "#b3261e"
EDGE = "#ff3b30"
BROKEN = "cannot be decoded"


@dataclass(frozen=True)
class SheetCell:
    """An image, or why it cannot be shown, over its name and a few words about it."""

    name: str
    words: str
    is_warning: bool
    image: Image.Image | str


def write_sheets(
    samples: DatasetSamples, folder: Path, threads: int, show: Callable[[int], object]
) -> Iterator[tuple[str, Path]]:
    """Write the sheets of a dataset, and yield bucket and file of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for done, (name, chosen, total) in enumerate(choose_images(samples), start=1):
        shown = run_bounded(lambda index: thumbnail_of(samples[index]), chosen, threads, lambda: None)
        thumbnails = {index: future.result() for index, future in shown}
        shown_of = f", {len(chosen)} shown" * (len(chosen) < total)
        title = f"{samples.dataset.id}   {name} px   {count_noun(total, samples.dataset.noun)}{shown_of}"
        content = io.BytesIO()
        sheet([cell_of(samples[index], thumbnails[index]) for index in chosen], title).save(content, "PNG")
        path = folder / f"{samples.dataset.id.replace('/', '-')}-{name}.png"
        write_file(path, content.getvalue())
        show(done)
        yield name, path


def choose_images(samples: DatasetSamples) -> Iterator[tuple[str, list[int], int]]:
    """Yield each bucket with its number of images and some of all degrees of cropping, the most first."""
    shapes, (of_images,) = bucket_shapes([samples])
    cropped = cropped_away(samples.sizes)[samples.sizes.index]
    for number, shape in sorted(enumerate(shapes), key=itemgetter(1)):
        own = np.flatnonzero(of_images == number)
        if len(own):
            own = own[np.argsort(-cropped[own], kind="stable")]
            places = np.unique(np.linspace(0, len(own) - 1, min(len(own), MAX_IMAGES)).round().astype(np.int64))
            yield str(shape), own[places].tolist(), len(own)


def thumbnail_of(sample: Sample) -> Image.Image | str:
    """Image in the size of a cell, its crop as training takes it framed; or why it cannot be decoded.

    References are above it, its mask is below. Of a clip there are the first, the middle and the last frame.
    """
    try:
        shown = [each for reference in sample.references for each in frames_of(reference)] + frames_of(sample)
        if sample.mask:
            size = shown[-1].size
            shown.append(framed(sample.mask.image(size).convert("RGB"), sample.geometry, size))
    except DECODE_ERRORS as error:
        return str(error) or type(error).__name__
    width, height = max(each.width for each in shown), sum(each.height + 2 for each in shown) - 2
    column, top = Image.new("RGB", (width, height), "white"), 0
    for each in shown:
        column.paste(each, ((width - each.width) // 2, top))
        top += each.height + 2
    return column


def frames_of(sample: Sample) -> list[Image.Image]:
    """Return an image, or three frames of a clip, no larger than a cell. Raises one of DECODE_ERRORS."""
    g, last = sample.geometry, sample.geometry.target.frames - 1
    scale = CELL_PX / max(g.resized.size)
    size = max(1, round(g.resized.width * scale)), max(1, round(g.resized.height * scale))
    return [framed(image, g, size) for image in sample.images(size, sorted({0, last // 2, last}))]


def framed(image: Image.Image, g: Geometry, size: tuple[int, int]) -> Image.Image:
    """Return an image in this size, dark where it is cropped."""
    scale = size[0] / g.resized.width
    whole = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    left, top = (round(start * scale) for start in g.crop_left_top)
    right, bottom = (
        min(side, round((start + length) * scale))
        for side, start, length in zip(size, g.crop_left_top, g.target.size, strict=True)
    )
    shown = Image.blend(whole, Image.new("RGB", size, "black"), DARKNESS)
    shown.paste(whole.crop((left, top, right, bottom)), (left, top))
    if g.resized.size != g.target.size:
        ImageDraw.Draw(shown).rectangle((left, top, right - 1, bottom - 1), outline=EDGE)
    return shown


def cell_of(sample: Sample, image: Image.Image | str) -> SheetCell:
    return SheetCell(sample.name, *describe(sample), image)


def sheet(cells: Sequence[SheetCell], title: str) -> Image.Image:
    """Lay out images in rows under a title, each over its name and numbers."""
    columns = min(COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    highest = max((each.image.height for each in cells if isinstance(each.image, Image.Image)), default=CELL_PX)
    step_x, step_y = CELL_PX + GAP_PX, highest + TEXT_PX + GAP_PX
    width = max(GAP_PX + columns * step_x, 3 * step_x)
    page = Image.new("RGB", (width, HEAD_PX + GAP_PX + rows * step_y), "white")
    pen, names = ImageDraw.Draw(page), [shown_name(each.name) for each in cells]
    large, small = Typesetter([title], 15), Typesetter(["…", *names, *(each.words for each in cells)], 11)
    large.draw_lines(page, GAP_PX, GAP_PX, [title], INK)
    for number, cell in enumerate(cells):
        left, top = GAP_PX + number % columns * step_x, HEAD_PX + GAP_PX + number // columns * step_y
        thumbnail = cell.image
        if isinstance(thumbnail, str):
            pen.rectangle((left, top, left + CELL_PX, top + highest), outline=FAINT)
            small.draw_lines(page, left + 4, top + 4, [BROKEN], WARNING)
        else:
            page.paste(thumbnail, (left + (CELL_PX - thumbnail.width) // 2, top + highest - thumbnail.height))
        small.draw_lines(page, left, top + highest + 3, [fit(names[number], small)], INK)
        small.draw_lines(page, left, top + highest + 17, [cell.words], WARNING if cell.is_warning else FAINT)
    return page


def describe(sample: Sample) -> tuple[str, bool]:
    """Return an image's size, what is cropped and how much it is enlarged; and whether that is much."""
    g = sample.geometry
    cropped = 1 - g.target.area / g.resized.area
    factor = max(new / old for new, old in zip(g.resized.size, g.original.size, strict=True))
    words = [str(g.original), f"{cropped:.0%} cropped" if cropped >= 0.005 else ""]
    words.append(f"x{factor:.1f}" if factor > MUCH_ENLARGED else "")
    return ", ".join(filter(None, words)), factor > MUCH_ENLARGED


def shown_name(name: str) -> str:
    return name if name.isprintable() else repr(name)


def fit(name: str, typesetter: Typesetter) -> str:
    # Names in one folder usually share a prefix.
    cut = name
    while cut and typesetter.length(f"…{cut}" if cut != name else name) > CELL_PX:
        cut = cut[1:]
    return cut if cut == name else f"…{cut}"


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
                image = read_rgb(Path(folder) / sample_id.removeprefix(f"{dataset}/"), SHOWN_PIXELS)
            except DECODE_ERRORS as error:
                return str(error) or type(error).__name__
            image.thumbnail((CELL_PX, CELL_PX))
            return image
    return "is in no local dataset"
