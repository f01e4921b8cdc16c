"""Records of what `encode_prompt` returned for single captions, whatever its structure, and batches made of
them.

A record has one tensor for each that depends on the caption, in the order of torch's pytree, with the axis
that differs between captions first: the trainer pads that one. `text_lengths` are the lengths along it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.automatic.pipeline_run import refused
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.folder.safetensors_dtypes import DTYPES
from simpletuner.private_api.of_torch import TreeSpec, tree_flatten, tree_unflatten

LENGTHS = "text_lengths"
EMBEDS = "prompt_embeds"


@dataclass(frozen=True)
class TextLayout:
    """The structure of encoded captions, and the leaves that depend on the caption."""

    structure: TreeSpec
    constants: tuple[Any, ...]
    """Leaves of one caption; those in `names` are replaced."""
    names: Mapping[int, str]
    """Name in the record, by the leaf's number."""
    varying: Mapping[int, int]
    """Axis of varying length per leaf: by caption, else the axis of tokens."""
    rest: Mapping[int, tuple[int, ...]]
    """Lengths of the other axes: a record has matrices, since the cache leaves out their rows of padding."""
    has_any_length: bool
    """True if embeddings are as long as their caption."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes in the record of the longest caption that was studied."""
    of_images: frozenset[int]
    """Numbers of the leaves that depend on given images, and on no caption."""
    counts: Mapping[int, Tensor]
    """Leaves of that caption with numbers above 1, such as text ends (Kandinsky 5), as recorded."""

    @classmethod
    def of(cls, encoded: Sequence[object], pipeline: str, with_another_image: object = None) -> TextLayout:
        """Compare the encodings of captions of different lengths, and that of the first with another image.

        Raises SettingsError for differences.
        """
        others = [] if with_another_image is None else [with_another_image]
        flat, structures = zip(*map(tree_flatten, [*others, *encoded]), strict=True)
        if any(structure != structures[0] for structure in structures):
            raise refused(pipeline, "its encode_prompt returns another structure for another caption")
        columns = dict(enumerate(zip(*flat, strict=True)))
        differing = {number: column for number, column in columns.items() if not all_equal(column)}
        for column in differing.values():
            if not all(isinstance(leaf, Tensor) and leaf.dtype in DTYPES.values() for leaf in column):
                raise refused(pipeline, f"its encode_prompt returns {column[0]!r:.60}, which depends on the caption")
        floating = [number for number, column in differing.items() if column[0].is_floating_point()]
        if not floating:
            raise refused(pipeline, "its encode_prompt returns no embedding that depends on the caption")
        embeds = max(floating, key=lambda number: max(leaf.numel() for leaf in differing[number]))
        names = {number: name_of(number, column[0], embeds) for number, column in differing.items()}
        varying = {number: varying_axis(column, pipeline) for number, column in differing.items()}
        rows = {number: [as_rows(leaf, varying[number]) for leaf in column] for number, column in differing.items()}
        shapes = {names[number]: max(tuple(each.shape) for each in column) for number, column in rows.items()}
        rest = {n: tuple(column[0].movedim(varying[n], 0).shape[1:]) for n, column in differing.items()}
        any_length = len({leaf.shape for leaf in differing[embeds]}) > 1
        shapes |= {LENGTHS: (len(names),)}
        last = {n: column[-1] for n, column in rows.items() if not column[-1].is_floating_point()}
        counts = {n: leaf for n, leaf in last.items() if leaf.max() > 1}
        of_images = frozenset(n for n, column in differing.items() if others and all_equal(column[1:]))
        return cls(structures[0], tuple(flat[0]), names, varying, rest, any_length, shapes, of_images, counts)

    def record(self, encoded: object, pipeline: str) -> Conditioning:
        """Return one caption's tensors, with a batch axis of one."""
        leaves, structure = tree_flatten(encoded)
        if structure != self.structure:
            raise refused(pipeline, "its encode_prompt returns another structure for another caption")
        for number, (leaf, constant) in enumerate(zip(leaves, self.constants, strict=True)):
            if number not in self.names and not all_equal((leaf, constant)):
                raise refused(pipeline, f"a caption changes what others do not: number {number} of its encodings")
        return self.record_of([leaves[number] for number in self.names])

    def record_of(self, leaves: Sequence[Tensor]) -> Conditioning:
        """Return the record of the leaves that depend on the caption, in their order."""
        named = zip(self.names.items(), leaves, strict=True)
        rows = {name: as_rows(leaf, self.varying[number]) for (number, name), leaf in named}
        lengths = torch.tensor([len(each) for each in rows.values()])
        return {name: each[None] for name, each in rows.items()} | {LENGTHS: lengths[None]}

    def of_caption(self, conditioning: Conditioning, sample: int) -> tuple[list[Any], list[Any]]:
        """Return the leaves of one sample that depend on its caption, and those of its images alone."""
        leaves = self.leaves(conditioning, sample)
        return (
            [leaves[number] for number in self.names if number not in self.of_images],
            [leaves[number] for number in self.names if number in self.of_images],
        )

    def leaves(self, conditioning: Conditioning, sample: int | None) -> list[Any]:
        """Return the leaves that one sample's caption was encoded to, floating-point ones as float32.

        None: those of all, whose lengths are equal, stacked (B, ...).
        """
        leaves, lead = list(self.constants), () if sample is not None else conditioning[LENGTHS].shape[:1]
        own = slice(None) if sample is None else sample
        lengths = conditioning[LENGTHS][sample or 0].tolist()  # on the host: they become shapes
        for (number, name), length in zip(self.names.items(), lengths, strict=True):
            rows = conditioning[name][own, :length].reshape(*lead, length, *self.rest[number])
            leaves[number] = rows.movedim(len(lead), len(lead) + self.varying[number])
        return [to_float32(leaf, conditioning[EMBEDS].device) for leaf in leaves]

    def one(self, conditioning: Conditioning, sample: int) -> Any:
        """Result of `encode_prompt` for one sample's caption."""
        return self.build(self.leaves(conditioning, sample))

    def build(self, leaves: Sequence[object]) -> Any:
        return tree_unflatten(leaves, self.structure)

    def example(self, device: torch.device) -> Any:
        """Return a text of ones, as long as the longest: for what does not depend on it."""
        rows = {name: self.shapes[name][0] for name in self.names.values()}
        return self.build([to_float32(leaf, device) for leaf in self.leaves(self.ones(rows), 0)])

    def ones(self, rows: Mapping[str, int]) -> Conditioning:
        """Return the record of a text of ones, with so many rows in each of its matrices."""
        record: Conditioning = {LENGTHS: torch.tensor([list(rows.values())])}
        for number, name in self.names.items():
            shape = (1, rows[name], *self.shapes[name][1:])
            record[name] = torch.ones(shape, dtype=self.constants[number].dtype)
            if (counted := self.counts.get(number)) is not None and counted.shape == shape[1:]:
                longest = self.shapes[EMBEDS][0]
                record[name][0] = counted.where(counted != longest, rows[EMBEDS])
        return record


def collate_texts(axes: Sequence[int | None], texts: Sequence[Sequence[object]]) -> list[object]:
    """Return leaves of single captions as those of what `encode_prompt` returns for all; shorter ones are
    padded with zeros.

    `axes` has each leaf's batch axis, None for one that has none.
    """
    return [
        longest(column) if axis is None else torch.cat(padded(column, axis), axis)
        for column, axis in zip(zip(*texts, strict=True), axes, strict=True)
    ]


def padded_records(records: Sequence[Conditioning]) -> Conditioning:
    """Return records of single captions as those of a batch."""
    return {
        name: nn.utils.rnn.pad_sequence([each[name][0] for each in records], batch_first=True) for name in records[0]
    }


def as_rows(leaf: Tensor, varying: int) -> Tensor:
    """Return a leaf as a matrix (or vector) whose rows are the axis that depends on the caption."""
    moved = leaf.movedim(varying, 0)
    return (moved.flatten(1) if moved.ndim > 2 else moved).contiguous()


def longest(column: Sequence[object]) -> Any:
    # A batch has one for all its captions, such as positions.
    return max(column, key=lambda leaf: leaf.numel() if isinstance(leaf, Tensor) else 0)


def padded(column: Sequence[Tensor], axis: int) -> list[Tensor]:
    shape = [max(leaf.shape[each] for leaf in column) for each in range(column[0].ndim)]
    shape[axis] = 1
    if all(list(leaf.shape) == shape for leaf in column):
        return list(column)
    wide = [leaf.new_zeros(shape) for leaf in column]
    for leaf, each in zip(column, wide, strict=True):
        each[tuple(slice(length) for length in leaf.shape)] = leaf
    return wide


def batch_axes(one: object, two: object) -> tuple[list[int | None] | None, str]:
    """Batch axis of each leaf, from one caption encoded alone and twice; or the reason for none."""
    (first, structure), (both, other) = tree_flatten(one), tree_flatten(two)
    if structure != other:
        return None, "it returns a list of texts"
    axes: list[int | None] = []
    for leaf, twice in zip(first, both, strict=True):
        if not (isinstance(leaf, Tensor) and isinstance(twice, Tensor)):
            if type(leaf) is not type(twice):
                return None, "it returns a mask for some batches only"
            axes.append(None)
            continue
        differ = [axis for axis, (a, b) in enumerate(zip(leaf.shape, twice.shape, strict=False)) if a != b]
        if not differ:
            axes.append(None)
        elif len(differ) == 1 and leaf.shape[differ[0]] == 1 and twice.shape[differ[0]] == 2:
            axes.append(differ[0])
        else:
            return None, f"it returns {tuple(twice.shape)} for two captions and {tuple(leaf.shape)} for one"
    return axes, ""


def name_of(number: int, leaf: Tensor, embeds: int) -> str:
    if number == embeds:
        return EMBEDS
    return f"text.{number}" if leaf.is_floating_point() else f"text_mask.{number}"


def varying_axis(column: Sequence[Tensor], pipeline: str) -> int:
    shapes = [tuple(leaf.shape) for leaf in column]
    if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        raise refused(pipeline, f"its encode_prompt returns {shapes[0]} and {shapes[-1]} for two captions")
    axes = [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if len(set(lengths)) > 1]
    if len(axes) > 1:
        raise refused(pipeline, f"its encode_prompt returns {shapes[0]} and {shapes[-1]} for two captions")
    # Of texts of one length the rows are tokens, too: the cache does not store those that are zero.
    return axes[0] if axes else int(len(shapes[0]) > 2)


def all_equal(column: Sequence[object]) -> bool:
    first = column[0]
    if isinstance(first, Tensor):
        return all(isinstance(each, Tensor) and same(first, each) for each in column)
    return all(not isinstance(each, Tensor) and each == first for each in column)


def same_texts(one: object, other: object) -> bool:
    """True if two results of `encode_prompt` are equal."""
    (leaves, structure), (others, second) = tree_flatten(one), tree_flatten(other)
    return structure == second and all(map(all_equal, zip(leaves, others, strict=True)))


def same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def to_float32(leaf: object, device: torch.device) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, torch.float32 if leaf.is_floating_point() else None)
