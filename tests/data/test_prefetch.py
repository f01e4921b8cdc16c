from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from buckets import sampler_of
from patience import PATIENCE

from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import (
    Batch,
    RankSlice,
    SampleReader,
    StepBatch,
    named_references,
    prefetch,
    reading_threads,
    references_in,
)
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.samples.samples import Sample
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape

CHANNELS, TEXT = 4, 3
SHAPES = {"64x64": (8, 8), "128x64": (8, 16)}
COUNT = 24


def dataset(**values) -> LocalImages:
    return LocalImages(id="d", instance_data_dir=Path(), **values)


PLAIN = dataset(caption_dropout_probability=0)


def sample(number: int) -> Sample:
    target = Shape(1, 64, 64 if number < 16 else 128)
    captions = tuple(f"caption {number}.{line}" for line in range(1 + number % 3))
    geometry = Geometry(target, target, (0, 0), target)
    return Sample(f"d/{number:02d}", "d", LocalStorage(Path()), f"{number}.png", "1", geometry, captions)


def latents(each: Sample) -> torch.Tensor:
    width, height = each.geometry.target.size
    return torch.full((CHANNELS, height // 8, width // 8), float(each.id[2:]))


def text(caption: str) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": torch.full((2, TEXT), float(caption.split()[1]))}


def source(**changes) -> SampleReader:
    values = {
        "samples": [sample(number) for number in range(COUNT)],
        "dataset": lambda number: PLAIN,
        "latents": latents,
        "image": lambda each: {"size": torch.tensor(each.geometry.target.size)},
        "text": lambda each, caption: text(caption),
        "no_caption": lambda each: {"prompt_embeds": torch.full((2, TEXT), -1.0)},
    }
    return SampleReader(**{**values, **changes})


def order() -> GlobalBatchSampler:
    return sampler_of({"128x64": list(range(16, 24)), "64x64": list(range(16))}, seed=1)


def steps_of(
    rank: int = 0, ranks: int = 1, accumulation: int = 1, batch: int = 8, dropout: float = 0.0, **changes
) -> Iterator[StepBatch]:
    rank_slice = RankSlice(rank, ranks, accumulation, seed=5)
    if dropout:
        changes["dataset"] = lambda number: dataset(caption_dropout_probability=dropout)
    return prefetch(source(**changes), order(), order().start(batch), 0, rank_slice, steps_ahead=2)


def joined(passes: list[Batch]) -> dict[str, torch.Tensor]:
    together = {name: torch.cat([getattr(each, name) for each in passes]) for name in ("latents", "noise", "u")}
    conditioning = {name: torch.cat([each.conditioning[name] for each in passes]) for name in passes[0].conditioning}
    return together | conditioning


def test_a_batch_has_the_shapes_that_a_step_expects():
    for step in islice(steps_of(), 6):
        (batch,) = step.micro_batches
        height, width = SHAPES["64x64" if batch.ids[0] < "d/16" else "128x64"]
        assert batch.latents.shape == batch.noise.shape == (8, CHANNELS, height, width)
        assert batch.latents.dtype == batch.noise.dtype == batch.u.dtype == torch.float32
        assert batch.u.shape == (8,)
        assert batch.conditioning["prompt_embeds"].shape == (8, 2, TEXT)
        assert batch.conditioning["size"].shape == (8, 2)


def test_everything_in_a_row_belongs_to_the_same_sample():
    for step in islice(steps_of(), 6):
        (batch,) = step.micro_batches
        numbers = torch.tensor([float(name[2:]) for name in batch.ids])
        assert torch.equal(batch.latents[:, 0, 0, 0], numbers)
        assert torch.equal(batch.conditioning["prompt_embeds"][:, 0, 0].floor(), numbers)


def test_steps_follow_the_order_and_tell_the_position_after_them():
    expected = list(islice(order().batches(order().start(8)), 7))
    for step, (batch, after) in zip(steps_of(), expected, strict=False):
        assert step.micro_batches[0].ids == tuple(f"d/{number:02d}" for number in batch.samples)
        assert step.next_state == after


@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (2, 4), (4, 2)])
def test_any_number_of_ranks_and_passes_sees_the_same_global_batch(ranks, accumulation):
    alone = list(islice(steps_of(dropout=0.3), 5))
    shares = [list(islice(steps_of(rank, ranks, accumulation, dropout=0.3), 5)) for rank in range(ranks)]
    for number, whole in enumerate(alone):
        pieces = [share[number].micro_batches[at] for at in range(accumulation) for share in shares]
        assert {len(piece.ids) for piece in pieces} == {8 // ranks // accumulation}
        for name, tensor in joined(pieces).items():
            assert torch.equal(tensor, joined(whole.micro_batches)[name]), name
        assert {share[number].next_state.batch for share in shares} == {whole.next_state.batch}


def test_samples_that_are_read_at_once_make_the_same_batches():
    together = threading.Barrier(8, timeout=PATIENCE)

    def late(each: Sample) -> torch.Tensor:
        together.wait()  # breaks unless all samples of a step are read at once
        return latents(each)

    with ThreadPoolExecutor(16) as pool:
        for one, two in zip(
            steps_of(dropout=0.3), islice(steps_of(dropout=0.3, latents=late, map_samples=pool.map), 5), strict=False
        ):
            assert one.micro_batches[0].ids == two.micro_batches[0].ids
            for name, tensor in joined(two.micro_batches).items():
                assert torch.equal(tensor, joined(one.micro_batches)[name]), name


def test_a_resumed_feed_goes_on_as_if_it_had_not_stopped():
    straight = list(islice(steps_of(dropout=0.5), 9))
    rank_slice = RankSlice(0, 1, 1, seed=5)
    dropping = source(dataset=lambda number: dataset(caption_dropout_probability=0.5))
    resumed = prefetch(dropping, order(), straight[3].next_state, 4, rank_slice, steps_ahead=2)
    for one, two in zip(straight[4:], resumed, strict=False):
        for name, tensor in joined(two.micro_batches).items():
            assert torch.equal(tensor, joined(one.micro_batches)[name]), name


def test_noise_differs_between_steps_and_between_repeats_in_one_batch():
    twice = sampler_of({"64x64": [0, 0]}, seed=1)
    rank_slice = RankSlice(0, 1, 1, seed=5)
    one, two = islice(prefetch(source(), twice, twice.start(2), 0, rank_slice, steps_ahead=1), 2)
    noises = [batch.noise[row] for step in (one, two) for batch in step.micro_batches for row in (0, 1)]
    assert len({float(noise[0, 0, 0]) for noise in noises}) == 4


def test_captions_are_drawn_from_all_lines():
    drawn = {
        float(value)
        for step in islice(steps_of(), 120)
        for value in step.micro_batches[0].conditioning["prompt_embeds"][:, 0, 0]
    }
    wanted = {float(f"{number}.{line}") for number in range(COUNT) for line in range(1 + number % 3)}
    assert len(drawn) == len(wanted)
    assert all(min(abs(value - each) for each in wanted) < 1e-4 for value in drawn)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 1.0])
def test_captions_are_dropped_at_the_rate_asked_for(dropout):
    steps = islice(steps_of(dropout=dropout), 250)
    rows = torch.cat([step.micro_batches[0].conditioning["prompt_embeds"][:, 0, 0] for step in steps])
    rate = float((rows == -1).float().mean())
    assert rate == dropout if dropout in (0.0, 1.0) else abs(rate - dropout) < 0.03


def test_a_failure_in_a_source_reaches_whoever_trains_on_it():
    def failing(each: Sample) -> torch.Tensor:
        raise OSError(f"cannot read {each.id}")

    with pytest.raises(OSError, match="cannot read d/"):
        next(steps_of(latents=failing))


def test_a_failure_comes_in_its_turn_after_the_good_steps():
    ids = [name for step in islice(steps_of(), 3) for name in step.micro_batches[0].ids]
    bad = next(name for name in ids[16:24] if name not in ids[:16])

    def sometimes(each: Sample) -> torch.Tensor:
        if each.id == bad:
            raise OSError("torn")
        return latents(each)

    steps = steps_of(latents=sometimes)
    assert len(list(islice(steps, 2))) == 2
    with pytest.raises(OSError, match="torn"):
        next(steps)


def test_no_more_steps_than_asked_for_are_made_ahead():
    made = []

    def counted(each: Sample) -> torch.Tensor:
        made.append(each.id)
        return latents(each)

    steps = steps_of(latents=counted)
    next(steps)
    assert len(made) <= 8 * 3
    steps.close()


def test_closing_a_feed_ends_its_threads():
    steps = steps_of()
    next(steps)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    steps.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_on_the_cpu_no_tensor_is_copied():
    batch = next(steps_of()).micro_batches[0]
    moved = batch.to(torch.device("cpu"))
    assert moved.ids == batch.ids
    for name, tensor in joined([batch]).items():
        assert torch.equal(joined([moved])[name], tensor)
    assert moved.latents is batch.latents
    assert moved.conditioning["prompt_embeds"] is batch.conditioning["prompt_embeds"]


def test_captions_are_dropped_and_targets_taken_from_the_base_model_as_each_dataset_says():
    datasets = {True: dataset(caption_dropout_probability=1), False: PLAIN}
    for step in islice(steps_of(dataset=lambda number: datasets[number < 8]), 6):
        (batch,) = step.micro_batches
        dropped = [value == -1 for value in batch.conditioning["prompt_embeds"][:, 0, 0].tolist()]
        assert dropped == [float(name[2:]) < 8 for name in batch.ids] and batch.from_base is None
    always = source(dataset=lambda number: datasets[True])
    (kept,) = next(prefetch(always, order(), order().start(8), 0, RankSlice(0, 1, 1, 5, False), 1)).micro_batches
    assert (kept.conditioning["prompt_embeds"] != -1).all(), "held-out samples keep their captions"
    regular = dataset(caption_dropout_probability=0, is_regularisation_data=True)
    shares = [list(islice(steps_of(rank, 2, dataset=lambda n: regular if n < 3 else PLAIN), 6)) for rank in range(2)]
    some = 0
    for pair in zip(*shares, strict=True):
        batches = [step.micro_batches[0] for step in pair]
        wanted = [[float(name[2:]) < 3 for name in batch.ids] for batch in batches]
        flags = [None if batch.from_base is None else batch.from_base.tolist() for batch in batches]
        assert flags == (wanted if any(map(any, wanted)) else [None, None]), "both ranks decide by the global batch"
        some += any(map(any, wanted)) and not all(map(any, wanted))
    assert some, "at least one batch has such samples on one rank only"


def test_threads_that_read_use_one_core_each_and_leave_all_to_training():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with reading_threads(3, "test") as pool:
            counts = list(pool.map(lambda _: torch.get_num_threads(), range(30)))
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
        assert set(counts) == {1}
    finally:
        torch.set_num_threads(before)


def test_references_and_masks_are_left_out_in_some_steps_of_all_ranks_alike():
    kind = {"dataset_type": "conditioning", "conditioning_type": "mask"}
    masked = PLAIN.paired_with([LocalImages(id="masks", instance_data_dir=Path(), **kind)])
    reader = source(
        dataset=lambda number: masked,
        image=lambda each: named_references([torch.ones(CHANNELS, 8, 8)]),
        mask=lambda each: torch.zeros(1, *latents(each).shape[1:]),
    )

    def seen(rank: int, **rates: float) -> list[tuple[bool, bool]]:
        rank_slice = RankSlice(rank, 2, 1, 5, **rates)
        steps = islice(prefetch(reader, order(), order().start(8), 0, rank_slice, steps_ahead=2), 60)
        batches = [batch for step in steps for batch in step.micro_batches]
        return [(bool(references_in(batch.conditioning)), batch.loss_mask is not None) for batch in batches]

    first, second = (seen(rank, reference_dropout=0.3, masked_loss=0.6) for rank in range(2))
    assert first == second and len(set(first)) == 4
    assert 30 < sum(has for has, _ in first) < 54 and 24 < sum(has for _, has in first) < 48
    assert seen(0) == [(True, True)] * 60


@pytest.mark.parametrize("skips", [True, False])
def test_the_first_latent_frame_has_no_loss_where_it_is_given_without_noise(skips):
    given = PLAIN.model_copy(update={"video": VideoSettings(is_i2v=True)})
    samples = [replace(sample(number), is_i2v=number % 2 == 0) for number in range(COUNT)]
    clips = source(
        samples=samples,
        dataset=lambda number: given,
        latents=lambda each: latents(each)[:, None].repeat(1, 3, 1, 1),
        skips_first_frame=skips,
    )
    for step in islice(prefetch(clips, order(), order().start(8), 0, RankSlice(0, 1, 1, 5), steps_ahead=1), 4):
        (batch,) = step.micro_batches
        if not skips:
            assert batch.loss_mask is None
            continue
        assert batch.loss_mask is not None and batch.loss_mask.shape == (8, 1, *batch.latents.shape[2:])
        first = torch.tensor([0.0 if int(name[2:]) % 2 == 0 else 1.0 for name in batch.ids])
        assert torch.equal(batch.loss_mask[:, 0, 0].amax((1, 2)), first)
        assert torch.equal(batch.loss_mask[:, 0, 0].amin((1, 2)), first) and bool(
            (batch.loss_mask[:, :, 1:] == 1).all()
        )
