"""Count one of equal calls of blocks, and let the others take what it took: of the 87 blocks of SDXL run 14.

A call is equal to another if both blocks have parameters of equal shapes, and both calls arguments of equal shapes. It
runs alone, forward and backward, on inputs of its own. All calls, the first one too, are then one node of autograd that
allocates what the graph of the block keeps, and notes in its backward pass the peaks before each gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function

from simpletuner.counting.step_counter import Execution, HeldBytes, StepCounter, Work
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.private_api.of_torch import FakeTensor, outside_modes, run_backward, tree_flatten, tree_unflatten

T = TypeVar("T")
Own = Callable[..., object]
"""The function that a replay replaces."""

EqualBlocks = Mapping[nn.Module, tuple[str, object]]
"""Name and kind of each block of which a model has others of the same kind."""

# Attribute of diffusers' modules: the function that calls a block whose activations are recomputed.
CHECKPOINT = "_gradient_checkpointing_func"


@dataclass(frozen=True)
class TensorLayout:
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.requires_grad)

    def within(self, storage: Tensor) -> Tensor:
        return storage.view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    def gradient(self, like: Tensor) -> Tensor:
        return torch.empty_like(like.new_empty_strided(self.shape, self.stride, dtype=self.dtype))


@dataclass(frozen=True)
class TensorLayouts:
    """Tensors, some of which share storages."""

    tensors: list[TensorLayout]
    storages: list[list[int]]
    """Numbers of the tensors in each."""
    sizes: list[int]
    """Bytes of each storage."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TensorLayouts:
        by_storage: dict[torch.UntypedStorage, list[int]] = {}
        for number, each in enumerate(tensors):
            by_storage.setdefault(each.untyped_storage(), []).append(number)
        sizes = [storage.nbytes() for storage in by_storage]
        return cls([TensorLayout.of(each) for each in tensors], [*by_storage.values()], sizes)

    def make(self, like: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors, none of which requires a gradient, and their storages."""
        storages, made = [new_storage(like, size) for size in self.sizes], dict[int, Tensor]()
        for storage, numbers in zip(storages, self.storages, strict=True):
            made |= {number: self.tensors[number].within(storage) for number in numbers}
        return [made[number] for number in range(len(made))], storages

    def made_in(self, ctx: Any, like: Tensor) -> tuple[Tensor, ...]:
        """Return tensors as the outputs of an autograd function."""
        made, ctx.storages = self.make(like)
        ctx.mark_non_differentiable(
            *(each for each, its in zip(made, self.tensors, strict=True) if not its.has_gradient)
        )
        return tuple(made)

    @property
    def have_gradient(self) -> bool:
        return any(each.has_gradient for each in self.tensors)


def new_storage(like: Tensor, num_bytes: int) -> Tensor:
    return like.new_empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, without the tensors that it was called with."""

    block: nn.Module
    kind: object
    """Equal for blocks that compute alike."""
    call: Callable[[Sequence[Tensor], Sequence[Tensor]], object]
    """The block with its arguments but for the tensors: `inputs` and `constants`."""
    inputs: TensorLayouts
    constants: list[Tensor]
    """The real tensors among the arguments, such as masks; of a call that is kept, copies."""
    form: object
    """Equal for equal arguments."""
    anchor: Tensor

    @classmethod
    def of(cls, block: nn.Module, kind: object, own: Own, args: object, kwargs: object, anchor: Tensor) -> BlockCall:
        flat, structure = tree_flatten((args, kwargs))
        inputs = fake_tensors(flat)
        places = {id(each): number for number, each in enumerate(inputs)}
        # None where a tensor is given.
        template = [None if isinstance(each, Tensor) else each for each in flat]
        numbers = [places.get(id(each)) for each in flat]
        real = [number for number, each in enumerate(flat) if isinstance(each, Tensor) and id(each) not in places]

        def call(given: Sequence[Tensor], constants: Sequence[Tensor]) -> object:
            values = [each if number is None else given[number] for each, number in zip(template, numbers, strict=True)]
            for number, each in zip(real, constants, strict=True):
                values[number] = each
            args, kwargs = tree_unflatten(values, structure)
            return own(*args, **kwargs)

        layouts, constants = TensorLayouts.of(inputs), [flat[number] for number in real]
        texts = [repr(each) for each in template] + [TensorLayout.of(each) for each in constants]
        form = (structure, repr(layouts.storages), *layouts.sizes, *numbers, *layouts.tensors, *texts)
        return cls(block, kind, call, layouts, constants, form, anchor)

    @property
    def key(self) -> object:
        return self.kind, self.form


def fake_tensors(flat: Sequence[Any]) -> list[Tensor]:
    """Return the fake tensors among arguments, each once."""
    return list({id(each): each for each in flat if isinstance(each, FakeTensor)}.values())


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors, uncounted."""
    with outside_modes():
        return [each.clone() for each in tensors]


@dataclass
class Recording:
    """Costs of a block alone; bytes are relative to those before its forward, or its backward pass."""

    outputs: TensorLayouts = field(default_factory=partial(TensorLayouts.of, ()))
    places: list[int | None] = field(default_factory=list)
    """For each output the number of the input that is returned as it is; None for those that are made."""
    structure: Any = None
    """Of the outputs, as a tree."""
    forward: Work = field(default_factory=Work)
    forward_peak: int = 0
    cast_bytes: int = 0
    """Held by autocast until the forward pass ends."""
    kept_bytes: int = 0
    kept_on_host: int = 0
    held_inputs: list[int] = field(default_factory=list)
    held_constants: list[int] = field(default_factory=list)
    held_storages: list[int] = field(default_factory=list)
    """Those of outputs that the block's graph refers to."""
    backward: Work = field(default_factory=Work)
    released: list[tuple[str, int]] = field(default_factory=list)
    """Each parameter's name within the block, and the peak before its gradient."""
    backward_peak: int = 0
    """After the last gradient."""
    with_gradient: set[int] = field(default_factory=set)
    """Inputs that a gradient reaches."""


class BlockInputs(Function):
    """Give a block that is recorded its inputs."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, inputs: TensorLayouts, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        made = inputs.made_in(ctx, anchor)
        del ctx.storages
        return made

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, None, None]:
        ctx.recording.with_gradient = {number for number, each in enumerate(grad_outputs) if each is not None}
        return None, None, None


class AfterBlock(Function):
    """Stand for all that comes after a block that is recorded."""

    @staticmethod
    def forward(ctx: Any, begin_backward: Callable[[], None], anchor: Tensor, *outputs: Tensor) -> Tensor:
        ctx.begin_backward, ctx.anchor = begin_backward, anchor
        ctx.layouts = [TensorLayout.of(each) for each in outputs]
        return anchor.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [layout.gradient(ctx.anchor) for layout in ctx.layouts]
        ctx.begin_backward()
        return None, None, *gradients


class Recorder:
    def __init__(self, execution: Execution, call: BlockCall, unused: Sequence[int]) -> None:
        """`unused` are the numbers of the outputs that no gradient reaches."""
        self.call, self.anchor, self.unused = call, call.anchor, unused
        parameters = dict(call.block.named_parameters())
        self.trained = {name: each for name, each in parameters.items() if each.requires_grad}
        self.constants = copied(call.constants)
        present = [*parameters.values(), *call.block.buffers(), call.anchor, *self.constants]
        self.counter = StepCounter.of(execution, iter(present))
        self.recording, self.base = Recording(), 0

    def learn(self) -> None:
        """Run the call, which shows a SelectiveRecomputation what there is to keep."""
        with self.counter.counting(), self.counter.forward():
            self.call.call(self.new_inputs(), self.constants)

    def record(self) -> Recording | None:
        """Return what the call takes; None where outputs are views of inputs, or no tensors."""
        counter, recording = self.counter, self.recording
        with counter.counting(), counter.gradients_released(self.trained):
            loss, held = self.run_forward(self.new_inputs())
            if loss is not None and loss.requires_grad:
                run_backward(loss)
            del held
        recording.backward = counter.memory.work
        recording.backward_peak = counter.memory.restart_peak() - self.base
        peaks = [peak - self.base for peak in counter.peaks]
        recording.released = [*zip(counter.released, peaks, strict=True)]
        return recording if loss is not None else None

    def new_inputs(self) -> list[Tensor]:
        inputs = self.call.inputs
        if not inputs.have_gradient:
            return inputs.make(self.anchor)[0]
        return list(BlockInputs.apply(self.recording, inputs, self.anchor.detach().requires_grad_()))

    def run_forward(self, inputs: list[Tensor]) -> tuple[Tensor | None, list[object]]:
        """Return what the backward pass begins with, and what to hold until it ends.

        Drops `inputs`: those that are still there afterwards are held by the block's graph.
        """
        memory, recording = self.counter.memory, self.recording
        start, memory.peak = memory.live, memory.live
        with self.counter.forward():
            outputs, recording.structure = tree_flatten(self.call.call(inputs, self.constants))
            with_casts = memory.live
        recording.forward, memory.work = memory.work, Work()
        recording.forward_peak = memory.restart_peak() - start
        recording.cast_bytes = with_casts - memory.live
        if not self.describe(outputs, inputs):
            return None, []
        made = [each for each, place in zip(outputs, recording.places, strict=True) if place is None]
        used = [each for number, each in enumerate(made) if each.requires_grad and number not in self.unused]
        loss = AfterBlock.apply(self.begin_backward, self.anchor, *used)
        of_inputs = [ref(each.untyped_storage()) for each in inputs]
        of_constants = [ref(each.untyped_storage()) for each in self.constants]
        of_outputs = [ref(made[numbers[0]].untyped_storage()) for numbers in recording.outputs.storages]
        del outputs, made, used
        live, sizes = memory.live - loss.nbytes, recording.outputs.sizes
        recording.held_storages = [number for number, each in enumerate(of_outputs) if each() is not None]
        recording.kept_bytes = live - start - sum(sizes[number] for number in recording.held_storages)
        recording.kept_on_host = memory.on_host
        inputs.clear()
        self.constants.clear()
        recording.held_constants = [number for number, each in enumerate(of_constants) if each() is not None]
        recording.held_inputs = [number for number, each in enumerate(of_inputs) if each() is not None]
        # Others may hold them, too, and a block's own input is what its backward pass needs last.
        return loss, [each() for each in of_inputs]

    def describe(self, outputs: list[Any], inputs: list[Tensor]) -> bool:
        """Note the form of the outputs; False for what a replay cannot make."""
        if not all(isinstance(each, Tensor) for each in outputs):
            return False
        numbers = {id(each): number for number, each in enumerate(inputs)}
        self.recording.places = [numbers.get(id(each)) for each in outputs]
        made = [each for each in outputs if id(each) not in numbers]
        self.recording.outputs = TensorLayouts.of(made)
        storages = {each.untyped_storage() for each in inputs}
        return not any(each.untyped_storage() in storages for each in made)

    def begin_backward(self) -> None:
        memory = self.counter.memory
        self.base, memory.peak = memory.live, memory.live
        memory.work = Work()


class Replay(Function):
    """Take what a recorded block takes."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        call: BlockCall,
        blocks: BlockReplays,
        recording: Recording,
        constants: Sequence[Tensor],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.name, ctx.call, ctx.blocks = name, call, blocks
        memory = blocks.counter.memory
        memory.peak = max(memory.peak, memory.live + recording.forward_peak)
        memory.work.add(recording.forward)
        outputs = recording.outputs.made_in(ctx, anchor)
        blocks.counter.cast_weights.append(HeldBytes(memory, recording.cast_bytes))
        ctx.storages = [ctx.storages[number] for number in recording.held_storages]
        ctx.held = [inputs[number] for number in recording.held_inputs]
        ctx.held += [constants[number] for number in recording.held_constants]
        ctx.held += [HeldBytes(memory, recording.kept_bytes), HeldBytes(memory, recording.kept_on_host, True)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        unused = tuple(number for number, each in enumerate(grad_outputs) if each is None)
        recording, counter = ctx.blocks.recording_of(ctx.call, unused), ctx.blocks.counter
        memory, base = counter.memory, counter.memory.live
        for name, peak in recording.released:
            counter.peaks.append(max(memory.peak, base + peak))
            counter.released.append(f"{ctx.name}.{name}")
            memory.peak = 0
        peak = max(memory.peak, base + recording.backward_peak)
        memory.work.add(recording.backward)
        del ctx.held, ctx.storages
        layouts, reached = enumerate(ctx.call.inputs.tensors), recording.with_gradient
        gradients = [each.gradient(ctx.call.anchor) if number in reached else None for number, each in layouts]
        memory.peak = peak  # of which the gradients of inputs are part
        return None, None, None, None, None, None, *gradients


@dataclass
class BlockReplays:
    """Recordings of one trace, by kind of block, form of arguments, and outputs without gradient."""

    counter: StepCounter
    anchor: Tensor
    """Fake, and requires a gradient: also a block whose inputs have none is part of the graph."""
    learns: bool = False
    """See `Recorder.learn`: before each call that is run."""
    recordings: dict[object, Recording | None] = field(default_factory=dict)
    calls: dict[object, BlockCall] = field(default_factory=dict)
    """The first of each kind, whose copies of real tensors stand for those of the others."""

    @contextmanager
    def replaced(self, model: nn.Module, blocks: EqualBlocks) -> Iterator[None]:
        recomputes = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
        callers = [each for each in model.modules() if hasattr(each, CHECKPOINT)] if recomputes else []
        alone = [] if recomputes else [*blocks]
        before = {each: getattr(each, CHECKPOINT) for each in callers}

        def checkpointed(checkpoint: Own, block: Any, *args: object, **kwargs: object) -> object:
            call = partial(checkpoint, block)
            if block in blocks:
                return self.run(block, *blocks[block], call, args, kwargs)
            if self.learns:
                self.learn(BlockCall.of(block, None, call, args, kwargs, self.anchor.detach()))
            return call(*args, **kwargs)

        def forward(block: nn.Module, own: Own, *args: object, **kwargs: object) -> object:
            return (
                own(*args, **kwargs) if self.counter.is_paused else self.run(block, *blocks[block], own, args, kwargs)
            )

        for caller, checkpoint in before.items():
            setattr(caller, CHECKPOINT, partial(checkpointed, checkpoint))
        for block in alone:
            block.forward = partial(forward, block, block.forward)
        try:
            yield
        finally:
            for caller, checkpoint in before.items():
                setattr(caller, CHECKPOINT, checkpoint)
            for block in alone:
                del block.forward

    def run(self, block: nn.Module, name: str, kind: object, own: Own, args: Any, kwargs: Any) -> object:
        call = BlockCall.of(block, kind, own, args, kwargs, self.anchor.detach())
        if (first := self.calls.get(call.key)) is None:
            # The real tensors may be gone after the forward pass; those of FLUX have 5 MB.
            first = self.calls[call.key] = replace(call, constants=copied(call.constants))
        recording = None if any(each.requires_grad for each in call.constants) else self.recording_of(first)
        if recording is None:
            if self.learns:
                self.learn(call)
            return own(*args, **kwargs)
        flat = tree_flatten((args, kwargs))[0]
        inputs = fake_tensors(flat)
        constants = [each for each in flat if isinstance(each, Tensor) and not isinstance(each, FakeTensor)]
        anchor = self.anchor if recording.outputs.have_gradient else call.anchor
        made = iter(Replay.apply(name, first, self, recording, constants, anchor, *inputs))
        outputs = [next(made) if place is None else inputs[place] for place in recording.places]
        return tree_unflatten(outputs, recording.structure)

    def recording_of(self, call: BlockCall, unused: tuple[int, ...] = ()) -> Recording | None:
        """Return what a call takes; None for one that cannot be replayed."""
        key = call.key, unused
        if key not in self.recordings:
            self.recordings[key] = self.recorded(call, unused)
        return self.recordings[key]

    def learn(self, call: BlockCall) -> None:
        self.aside(Recorder(self.counter.execution, call, ()).learn)

    def recorded(self, call: BlockCall, unused: tuple[int, ...]) -> Recording | None:
        if self.learns:
            self.learn(call)
        return self.aside(Recorder(self.counter.execution, call, unused).record)

    def aside(self, function: Callable[[], T]) -> T:
        """Call a function in a thread without the modes of this one."""
        before = self.counter.memory.live
        self.counter.is_paused = True
        try:
            with ThreadPoolExecutor(max_workers=1) as thread:
                return thread.submit(function).result()
        finally:
            self.counter.is_paused = False
            # Autocast has one cache for all threads, cleared by the end of the function's forward pass.
            memory = self.counter.memory
            self.counter.cast_weights.append(HeldBytes(memory, before - memory.live))


def equal_blocks(model: nn.Module, unused: Sequence[str]) -> EqualBlocks:
    """Return the blocks of a model, but for those that are the only ones of their kind.

    Qwen-Image's last block is one: it has `unused` parameters, and what it makes of the text is not kept.
    """
    classes = recommended_blocks(model)
    named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    blocks = {block: (name, kind_of(name, block, unused)) for name, block in named}
    counts = Counter(kind for _, kind in blocks.values())
    return {block: (name, kind) for block, (name, kind) in blocks.items() if counts[kind] > 1}


def kind_of(name: str, block: nn.Module, unused: Sequence[str]) -> object:
    parameters = tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in block.named_parameters())
    idle = tuple(each.removeprefix(f"{name}.") for each in unused if each.startswith(f"{name}."))
    return repr(block), parameters, idle  # non-parameters such as strides are in the repr
