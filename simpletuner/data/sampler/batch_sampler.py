"""Global order of samples: seed and state determine every global batch, for any number of ranks.

Each bucket is an endless stream of epochs, with the repeats of a sample spread over each epoch
(`epoch_order.py`). Batches are cut from the streams in turn. A sample that the batch already holds waits for
the next batch, so a batch holds duplicates only if unavoidable. The rest of a bucket that does not fill a
batch at the end of an epoch opens the next epoch, so no sample is lost or shown twice as often.

Nothing here grows with the data: orders are computed where needed, and a state holds the position in each
bucket. A schedule of buckets lets datasets begin and end at a step or epoch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from simpletuner.data.config.dataset_parts import NO_LIMIT, Window
from simpletuner.data.sampler.epoch_order import Bucket, EpochOrder, EpochStream, hash_key
from simpletuner.errors import SettingsError


class BucketSchedule:
    """Buckets at each step and epoch, from the datasets that take part.

    `make` groups the samples of some datasets, given whether each one takes part.
    """

    def __init__(self, windows: Sequence[Window], make: Callable[[tuple[bool, ...]], dict[str, Bucket]]) -> None:
        self.windows, self.make = windows, make
        self._made: dict[tuple[bool, ...], dict[str, Bucket]] = {}
        self.step_limits = sorted({limit for each in windows for limit in (each.start_step, each.end_step)})
        self.epoch_limits = sorted({limit for each in windows for limit in (each.start_epoch, each.end_epoch)})

    def active(self, step: int, epoch: int) -> tuple[bool, ...]:
        return tuple(window.contains(step, epoch) for window in self.windows)

    def buckets(self, step: int, epoch: int) -> dict[str, Bucket]:
        """Return the buckets by name, sorted. Raises SettingsError where no dataset takes part."""
        active = self.active(step, epoch)
        if self.windows and not any(active):
            raise SettingsError(
                f"no dataset takes part in step {step + 1} (epoch {epoch + 1})",
                "change start_epoch, start_step, end_epoch or end_step, or lower max_train_steps or num_train_epochs",
            )
        # Grouping reads all samples, and few sets of datasets are ever active together.
        if active not in self._made:
            self._made[active] = dict(sorted(self.make(active).items()))
        return self._made[active]

    def next_step(self, step: int, epoch: int) -> int:
        """Return the first step after this one at which other datasets take part, in this epoch."""
        active, later = self.active(step, epoch), self.step_limits[bisect_right(self.step_limits, step) :]
        return next((limit for limit in later if self.active(limit, epoch) != active), NO_LIMIT)

    def next_epoch(self, epoch: int) -> int:
        """Return the first epoch after this one in which other datasets may take part."""
        return next((limit for limit in self.epoch_limits if limit > epoch), NO_LIMIT)


# Version of what decides buckets and the order of samples (`data_version` in state.json): a position
# means something only in the order that it was counted in.
DATA_VERSION = 1


@dataclass(frozen=True)
class SamplerState:
    """A position in the data: `batch` batches into `epoch`, the last ones of `batch_size`.

    `consumed` items of each bucket's epoch are taken; of these and of earlier epochs, the `carried` samples
    wait. Saved in state.json by these names, but for `step`, the steps of the run so far, which is the
    checkpoint's own.
    """

    epoch: int
    batch: int
    batch_size: int
    consumed: Mapping[str, int]
    carried: Mapping[str, Sequence[int]] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """The sample indices of one optimizer step, with how often each occurred earlier in the same batch."""

    bucket: str
    samples: tuple[int, ...]
    occurrences: tuple[int, ...]


class GlobalBatchSampler:
    """Yield global batches from any state.

    Where other datasets begin to take part, the epoch ends early, and the next one is of their buckets.
    """

    def __init__(self, buckets: Mapping[str, Bucket], seed: int, schedule: BucketSchedule | None = None) -> None:
        # Sorted, so that the order of datasets does not change the turns.
        self.buckets, self.seed = dict(sorted(buckets.items())), seed
        self.schedule = schedule or BucketSchedule([], lambda active: self.buckets)

    def start(self, batch_size: int, epoch: int = 0, step: int = 0) -> SamplerState:
        """Return the state at the start of an epoch: of a new run, or of one that goes on with other data."""
        return SamplerState(epoch, 0, batch_size, dict.fromkeys(self.schedule.buckets(step, epoch), 0), step=step)

    def batches(self, state: SamplerState) -> Iterator[tuple[GlobalBatch, SamplerState]]:
        """Yield each batch with the state after it. Never ends."""
        while True:
            streams = self._streams(state)
            names, batches_left = list(streams), [len(stream) // state.batch_size for stream in streams.values()]
            for _ in range(min(sum(batches_left), self._next_change(state) - state.step)):
                turn = self._choose_bucket(state, batches_left)
                batches_left[turn] -= 1
                name, stream = names[turn], streams[names[turn]]
                samples = stream.take(state.batch_size)
                state = advance(state, name, stream)
                yield make_batch(name, samples), state
            state = self._next_epoch(state, streams)

    def with_batch_size(self, state: SamplerState, batch_size: int) -> SamplerState:
        # What is left of the epoch is cut into new batches.
        return replace(state, batch_size=batch_size)

    def count_steps(self, epochs: int, batch_size: int, max_steps: int = NO_LIMIT) -> int:
        """Number of batches in the first `epochs` epochs, at most `max_steps`.

        Raises SettingsError where no dataset takes part before that.
        """
        return self.count_steps_left(self.start(batch_size), epochs, max_steps)

    def count_steps_left(self, state: SamplerState, epochs: int, max_steps: int = NO_LIMIT) -> int:
        """Number of batches from `state` to the end of the first `epochs` epochs."""
        first = state.step
        while state.epoch < epochs and state.step < max_steps:
            state = self._skip(state, epochs, max_steps)
        return state.step - first

    def contains(self, state: SamplerState) -> bool:
        buckets, taken, epoch = self._buckets(state), state.consumed, state.epoch
        return taken.keys() == buckets.keys() and all(
            taken[name] <= each.items_until(epoch + 1) - each.items_until(epoch) for name, each in buckets.items()
        )

    def _skip(self, state: SamplerState, epochs: int, max_steps: int) -> SamplerState:
        """Return a later state: at the end, or where other datasets may begin to take part."""
        epoch = min(epochs, self.schedule.next_epoch(state.epoch))
        change = min(max_steps, self._next_change(state))
        # What does not fill a batch is carried into the next epoch, so the batches of several epochs are one
        # division: no order is computed to count the steps of a run.
        left = self._count_left(state, epoch)
        step = state.step + sum(items // state.batch_size for items in left.values())
        # Datasets change at a step within these epochs, where `batches` ends an epoch early. The steps until
        # an epoch's end grow with the epoch, so bisection finds the epoch that is cut.
        if is_cut := step > change:
            steps, later = change - state.step, range(state.epoch + 1, epoch + 1)
            epoch = later[bisect_left(later, steps, key=lambda end: self._steps_until(state, end))]
            step = change
        if epoch == epochs or step == max_steps:
            return replace(state, epoch=epoch, step=step)
        after = self.start(state.batch_size, epoch, step)
        if is_cut or self.schedule.active(step, epoch) != self._active(state):
            return after
        # Only the number of carried samples matters to a count, so a range stands for them.
        return replace(after, carried={name: range(items % state.batch_size) for name, items in left.items()})

    def _steps_until(self, state: SamplerState, epoch: int) -> int:
        return sum(items // state.batch_size for items in self._count_left(state, epoch).values())

    def _count_left(self, state: SamplerState, epoch: int) -> dict[str, int]:
        # Carried samples are consumed but not in a batch yet, so they count as left; they may be of earlier
        # epochs, so this is negative near the start of an epoch.
        begun = {name: state.consumed[name] - len(state.carried.get(name, ())) for name in state.consumed}
        return {
            name: bucket.items_until(epoch) - bucket.items_until(state.epoch) - begun[name]
            for name, bucket in self._buckets(state).items()
        }

    # Which datasets an epoch has is decided by the step at which it begins.

    def _buckets(self, state: SamplerState) -> Mapping[str, Bucket]:
        return self.schedule.buckets(state.step - state.batch, state.epoch)

    def _active(self, state: SamplerState) -> tuple[bool, ...]:
        return self.schedule.active(state.step - state.batch, state.epoch)

    def _next_change(self, state: SamplerState) -> int:
        return self.schedule.next_step(state.step - state.batch, state.epoch)

    def _streams(self, state: SamplerState) -> dict[str, EpochStream]:
        return {
            name: EpochStream(
                EpochOrder(bucket, self.seed, name, state.epoch), state.consumed[name], state.carried.get(name, ())
            )
            for name, bucket in self._buckets(state).items()
        }

    def _choose_bucket(self, state: SamplerState, batches_left: Sequence[int]) -> int:
        """Draw the next batch's bucket, in proportion to the batches each has left in the epoch.

        So every order of turns is equally likely, as if they had been shuffled.
        """
        sums = list(accumulate(batches_left))
        return bisect_right(sums, hash_key(self.seed, "turns", state.epoch, state.batch) % sums[-1])

    def _next_epoch(self, state: SamplerState, streams: Mapping[str, EpochStream]) -> SamplerState:
        following = self.start(state.batch_size, state.epoch + 1, state.step)
        # Whole batches that are left mean that the datasets changed. What waits is of buckets that may not
        # exist any more, so nothing is carried.
        is_cut = any(len(stream) >= state.batch_size for stream in streams.values())
        if is_cut or self._active(following) != self._active(state):
            return following
        carried = {name: rest for name, stream in streams.items() if (rest := stream.remaining())}
        return replace(following, carried=carried)


def advance(state: SamplerState, name: str, stream: EpochStream) -> SamplerState:
    """Return the state after a batch of a bucket."""
    carried = {**state.carried, name: [*stream.waiting]}
    if not stream.waiting:
        del carried[name]
    consumed = {**state.consumed, name: stream.consumed}
    return SamplerState(state.epoch, state.batch + 1, state.batch_size, consumed, carried, state.step + 1)


def make_batch(bucket: str, samples: Sequence[int]) -> GlobalBatch:
    seen: Counter[int] = Counter()
    occurrences = []
    for sample in samples:
        occurrences.append(seen[sample])
        seen[sample] += 1
    return GlobalBatch(bucket, tuple(samples), tuple(occurrences))


def split_for_rank(batch: GlobalBatch, data_rank: int, data_size: int, accumulation: int) -> list[list[int]]:
    """Return, for each micro batch of one data rank, its indices into the global batch.

    Micro batches are contiguous and ranks are contiguous within them, so the gradient of a step is the same
    mean over the same samples for any number of ranks and accumulation steps.
    """
    # Both divide without a remainder: a global batch is micro batch x ranks x accumulation.
    per_micro_batch = len(batch.samples) // accumulation
    per_rank = per_micro_batch // data_size
    starts = (number * per_micro_batch + data_rank * per_rank for number in range(accumulation))
    return [list(range(start, start + per_rank)) for start in starts]
