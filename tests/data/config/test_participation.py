from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from dataset_files import data_of, image, refusal
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scanning import drawn

from simpletuner.data.config.dataset_parts import Window, copies_per_epoch
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.sampler.batch_sampler import BucketSchedule, GlobalBatchSampler, SamplerState
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.buckets import fill_buckets, make_buckets
from simpletuner.data.samples.samples import Samples
from simpletuner.errors import DataError, SettingsError
from simpletuner.preparation.prepare import make_plan
from simpletuner.settings.declared.sections import Settings, Training

COUNTS = st.integers(1, 7)


def copies(*pairs: tuple[float, int]) -> list:
    return copies_per_epoch(
        [LocalImages(id="d", instance_data_dir=Path(), probability=each, repeats=more) for each, more in pairs]
    )


def test_the_largest_probability_is_1_and_repeats_multiply():
    assert copies((1, 0), (0.5, 0), (0.25, 3)) == [1, Fraction(1, 2), 1]
    assert copies((0.3, 0), (0.7, 1)) == [Fraction(3, 7), 2]
    assert [type(each) for each in copies((0.1, 0), (0.1, 2))] == [int, int], "equal weights change no order"


@given(st.lists(st.fractions(0, 3, max_denominator=4).filter(bool), min_size=1, max_size=3, unique=True), st.data())
@hypothesis_settings(max_examples=50)
def test_each_sample_is_shown_as_often_as_its_weight_says_and_no_epoch_repeats_the_part_of_another(weights, data):
    groups, first = {}, 0
    for weight in weights:
        groups[weight.numerator if weight.denominator == 1 else weight] = np.arange(first, first + 10, dtype=np.uint32)
        first += 10
    bucket = Bucket(groups, passes=data.draw(st.integers(1, 2)))
    sampler, batch_size = GlobalBatchSampler({"a": bucket}, data.draw(st.integers(0, 99))), data.draw(st.integers(1, 2))
    epochs = 12  # a multiple of all denominators
    steps = sampler.count_steps(epochs, batch_size)
    taken = list(islice(sampler.batches(sampler.start(batch_size)), steps))
    seen = Counter(sample for batch, _ in taken for sample in batch.samples)
    due = {sample: bucket.passes * weight * epochs for weight, samples in groups.items() for sample in samples.tolist()}
    assert sum(due.values()) - seen.total() == sum(due.values()) % batch_size
    assert sum(abs(due[sample] - seen[sample]) for sample in due) < batch_size
    at = data.draw(st.integers(0, steps - 1))
    resumed = GlobalBatchSampler({"a": bucket}, sampler.seed).batches(taken[at][1])
    assert list(islice(resumed, 5)) == taken[at + 1 : at + 6] or at + 6 > steps
    assert sampler.contains(taken[at][1])


def test_half_a_dataset_is_shown_in_one_epoch_and_the_other_half_in_the_next():
    sampler = GlobalBatchSampler({"a": Bucket({Fraction(1, 2): np.arange(10, dtype=np.uint32)})}, 3)
    batches = [batch.samples for batch, _ in islice(sampler.batches(sampler.start(5)), 4)]
    assert len(set(batches[0])) == 5 and {*batches[0], *batches[1]} == {*batches[2], *batches[3]} == set(range(10))


@pytest.mark.parametrize("effective_batch_size", [2, 3, 8, 11])
def test_small_weighted_buckets_fill_each_epoch_when_they_are_repeated(effective_batch_size):
    rare, some = drawn(*[(64, 64)] * 3, probability=0.1), drawn((64, 64), dataset="e", probability=0.7)
    samples = Samples([rare, some, drawn((128, 64), dataset="f")])
    small = {"64x64": make_buckets(samples)["64x64"]}
    (bucket,) = fill_buckets(small, effective_batch_size, oversubscribe=True).values()
    items = [bucket.items_until(epoch + 1) - bucket.items_until(epoch) for epoch in range(100)]
    assert min(items) >= effective_batch_size
    with pytest.raises(DataError, match="cannot fill") as caught:
        fill_buckets(small, effective_batch_size, oversubscribe=False)
    assert "and probability=1, or" in caught.value.hint


WINDOWS = st.builds(
    lambda start, steps, epoch, epochs: Window(start, start + steps, epoch, epoch + epochs),
    st.integers(0, 12),
    st.integers(1, 40),
    st.integers(0, 3),
    st.integers(1, 6),
)


def sampler_with(windows: list[Window], seed: int, sizes: tuple[int, ...] = (9, 5, 7)) -> GlobalBatchSampler:
    """Return a sampler of datasets of `sizes` images in bucket a, and as many in bucket b."""

    def make(active: tuple[bool, ...]) -> dict[str, Bucket]:
        firsts = np.cumsum([0, *sizes])
        own = [np.arange(firsts[n], firsts[n + 1]) for n, takes_part in enumerate(active) if takes_part]
        samples = np.concatenate(own).astype(np.uint32)
        return {"a": Bucket({1: samples}), "b": Bucket({2: samples + 100})}

    schedule = BucketSchedule(windows, make)
    return GlobalBatchSampler(schedule.buckets(0, 0), seed, schedule)


def dataset_of(sample: int, sizes: tuple[int, ...] = (9, 5, 7)) -> int:
    return int(np.searchsorted(np.cumsum(sizes), sample % 100, side="right"))


def again(state: SamplerState, step: int) -> SamplerState:
    """Return a state as a checkpoint holds it, which has the step by itself."""
    saved = {name: value for name, value in asdict(state).items() if name != "step"}
    return SamplerState(**json.loads(json.dumps(saved)), step=step)


@given(st.lists(WINDOWS, min_size=1, max_size=2), st.integers(1, 5), st.integers(0, 99), st.integers(0, 55))
@hypothesis_settings(max_examples=150)
def test_only_active_datasets_are_shown_a_resume_goes_on_alike_and_steps_are_counted(windows, size, seed, at):
    windows = [Window(), *windows]
    sampler = sampler_with(windows, seed)
    taken = list(islice(sampler.batches(sampler.start(size)), 60))
    for step, (batch, after) in enumerate(taken):
        assert after.step == step + 1 and len(set(batch.samples)) == size
        active = {n for n, window in enumerate(windows) if window.contains(step, after.epoch)}
        assert {dataset_of(sample) for sample in batch.samples} <= active
    before = taken[at - 1][1] if at else sampler.start(size)
    position = again(before, at)
    assert position == before and sampler.contains(position)
    assert list(islice(sampler_with(windows, seed).batches(position), 4)) == taken[at : at + 4]
    for epochs in range(taken[-1][1].epoch):
        counted = sum(after.epoch < epochs for _, after in taken)
        assert sampler.count_steps(epochs, size) == counted
        assert sampler.count_steps_left(position, epochs) == max(0, counted - at)
        assert sampler.count_steps(epochs, size, max_steps=at) == min(counted, at)


def test_an_epoch_ends_where_a_dataset_comes_or_goes_and_the_next_one_has_all_of_them():
    sampler = sampler_with([Window(), Window(start_step=3, end_step=10)], 0, sizes=(4, 6))
    taken = list(islice(sampler.batches(sampler.start(2)), 16))
    epochs = [after.epoch for _, after in taken]
    assert epochs == [0] * 3 + [1] * 7 + [2] * 6, "3 of 6 batches, 7 of 15, 6 of 6"
    assert Counter(sample for batch, _ in taken[10:] for sample in batch.samples) == {
        **dict.fromkeys(range(4), 1),
        **dict.fromkeys(range(100, 104), 2),
    }
    by_epoch = sampler_with([Window(), Window(start_epoch=1)], 0, sizes=(3, 5))
    counts = Counter(after.epoch for _, after in islice(by_epoch.batches(by_epoch.start(2)), 28))
    assert counts == {0: 4, 1: 12, 2: 12}, "what one epoch leaves over is dropped where the datasets change"


def plan(*windows: dict, steps: int | None = None, epochs: int = 1):
    samples = Samples([drawn(*[(64, 64)] * 8, dataset=str(number), **keys) for number, keys in enumerate(windows)])
    training = Training(train_batch_size=4, max_train_steps=steps, num_train_epochs=epochs)
    return make_plan(Settings(training=training), [], [], samples)


def test_each_step_needs_a_dataset_and_the_identity_of_the_data_has_the_times():
    gap = [{"end_step": 10}, {"start_step": 12}]
    assert plan(*gap, steps=10).sampler.count_steps(1, 4) == 2
    for limits in ({"steps": 11}, {"epochs": 6}):
        with pytest.raises(SettingsError, match=r"no dataset takes part in step 11 \(epoch 6\)"):
            plan(*gap, **limits)
    with pytest.raises(SettingsError, match="no dataset takes part in step 1 "):
        plan({"start_epoch": 2})
    plan({"end_epoch": 3}, epochs=3)
    with pytest.raises(SettingsError, match=r"step 7 \(epoch 4\)"):
        plan({"end_epoch": 3}, epochs=4)
    values = [{}, {"start_step": 1}, {"end_step": 9}, {"end_epoch": 2}, {"probability": 0.5}]
    assert len({plan({}, each).digest for each in values}) == len(values)
    assert plan({}, {}).digest == plan({"probability": 0.2}, {"probability": 0.2}).digest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"probability": 0}, "probability = 0 (d, dataset `one`): use a number"),
        ({"probability": -1}, "probability = -1 (d, dataset `one`): use a number"),
        ({"start_step": 5, "end_step": 5}, "end_step = 5 (d, dataset `one`): it is not after start_step"),
        ({"start_step": 5, "disable_after_epoch_step": 5},
         "disable_after_epoch_step = 5 (d, dataset `one`): it is not after start_step"),
        ({"start_epoch": 3, "end_epoch": 2}, "end_epoch = 2 (d, dataset `one`): it is before start_epoch"),
        ({"start_step": -1}, "start_step = -1 (d, dataset `one`): use a whole number of at least 0"),
        ({"end_step": 4, "disable_after_epoch_step": 5}, "end_step means the same: keep one of them"),
    ],
)  # fmt: skip
def test_wrong_values_are_mistakes(tmp_path, values, said):
    message = refusal(data_of(tmp_path, image(**values))).replace(f"{tmp_path}/multidatabackend.json:1", "d")
    assert said in message


def test_epochs_are_counted_from_1_and_ends_are_the_last_ones(tmp_path):
    values = {"start_epoch": 2, "end_epoch": 3, "start_step": 4, "disable_after_epoch_step": 9}
    off = {"start_epoch": 0, "end_epoch": 0, "start_step": 0, "end_step": 0, "probability": 1}
    (own, plain), _ = load_datasets(data_of(tmp_path, image(**values), image(id="two", **off)))
    assert (own.window, plain.window) == (Window(4, 9, 1, 3), Window())


def test_held_out_datasets_have_no_part_in_weights_and_times():
    held_out = drawn(*[(64, 64)] * 4, dataset="e", dataset_type="eval")
    light = [drawn(*[(64, 64)] * 8, dataset=name, probability=0.1) for name in "ab"]
    (bucket,) = make_buckets(Samples([held_out, *light]), range(4)).values()
    assert [(copies, len(samples)) for copies, samples in bucket.groups.items()] == [(1, 16)]
    training = Training(train_batch_size=4, max_train_steps=3)
    ending = drawn(*[(64, 64)] * 8, end_step=2)
    with pytest.raises(SettingsError, match="no dataset takes part in step 3 "):
        make_plan(Settings(training=training), [], [], Samples([held_out, ending]))
