"""Replays of a pipeline's call: its tensor operators alone, traced once for each shape of what it is given.

The Python of a call costs 1 to 3 CPU ms per step, and some calls make pixels of a whole clip for a VAE that is never
run (Wan). What depends on shapes alone is computed once; what no input of the denoiser is made of is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.pipeline_run import FOREIGN_ERRORS, StopCall
from simpletuner.private_api.of_torch import TreeSpec, trace_operators, tree_flatten, tree_unflatten

Denoise = Callable[[dict[str, object]], object]
Run = Callable[[Sequence[Tensor], Denoise], Tensor | None]
"""A pipeline's call, given the noise, the time and all else that samples differ by; returns the prediction,
None if `denoise` ended it."""
Traced = Callable[..., list[Tensor]]
"""A function of tensors, or a trace of one."""

READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


class NotTraced(Exception):
    """Raised for a call that may have other operators where it is given other values."""


@dataclass
class CallReplay:
    """A traced call: the denoiser's inputs, and the prediction that is made of its output."""

    run: Run
    examples: InitVar[Sequence[Tensor]]
    """Values that the call is given, of which shapes and dtypes matter."""
    together: bool = False
    """True for samples that share a denoiser call: all that is given has a first axis more, of samples."""
    leaves: list[Any] = field(default_factory=list)
    """The denoiser's inputs, flat; tensors are those of the last call."""
    structure: TreeSpec | None = None
    places: tuple[int, ...] = ()
    """Numbers of the tensors among the leaves."""
    predictions: dict[object, Traced] = field(default_factory=dict)

    def __post_init__(self, examples: Sequence[Tensor]) -> None:
        """Raises NotTraced."""
        self.inputs = self.traced(self.make_inputs, examples)

    def predict(self, denoise: Denoise, given: Sequence[Tensor]) -> Tensor:
        """Return the prediction, of samples that share a call (B, ...). Raises NotTraced."""
        with torch.no_grad():
            inputs = self.inputs(*given)
        return self.prediction(given, denoise(self.named(inputs)))

    def make_inputs(self, *given: Tensor) -> list[Tensor]:
        seen: list[dict[str, Any]] = []
        self.run(given, lambda named: stop_with(seen, named))
        leaves, self.structure = tree_flatten(seen[0])
        self.places = tuple(number for number, each in enumerate(leaves) if isinstance(each, Tensor))
        self.leaves = [None if number in self.places else each for number, each in enumerate(leaves)]
        return [leaves[number] for number in self.places]

    def prediction(self, given: Sequence[Tensor], output: Any) -> Tensor:
        made, structure = tree_flatten(output)
        key = (structure, *(form_of(each) if isinstance(each, Tensor) else each for each in made))
        tensors = [each[:, None] if self.together else each for each in made if isinstance(each, Tensor)]
        if key not in self.predictions:

            def predict(*all_given: Tensor) -> list[Tensor]:
                own = iter(all_given[len(given) :])
                leaves = [next(own) if isinstance(each, Tensor) else each for each in made]
                prediction = self.run(all_given[: len(given)], lambda _: tree_unflatten(leaves, structure))
                assert prediction is not None
                return [prediction]

            self.predictions[key] = self.traced(predict, [*given, *tensors])
        return self.predictions[key](*given, *tensors)[0]

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the denoiser's inputs by name."""
        assert self.structure is not None
        leaves = list(self.leaves)
        for number, each in zip(self.places, tensors, strict=True):
            leaves[number] = each
        return tree_unflatten(leaves, self.structure)

    def traced(self, function: Traced, given: Sequence[Tensor]) -> Traced:
        given = [each.detach() for each in given]
        return traced_together(function, given) if self.together else traced(function, given).forward


@torch.no_grad()
def traced(function: Traced, given: Sequence[Tensor]) -> Any:
    try:
        graph = trace_operators(function, given)
    except torch.OutOfMemoryError:
        raise
    except (SettingsError, *FOREIGN_ERRORS) as error:  # a value is read, or numpy is used
        raise NotTraced from error
    if any(reads_values(node) for node in graph.graph.nodes):
        raise NotTraced
    graph.graph.eliminate_dead_code()
    fold_constants(graph)
    join_views(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@torch.no_grad()
def traced_together(function: Traced, given: Sequence[Tensor]) -> Traced:
    """Trace a function of one sample as one of all, (B, ...) each: by operators over a batch, or one by one
    where these make other bits.

    Raises NotTraced where a result that differs between samples has no axis for them.
    """
    one = traced(function, [each[0] for each in given])
    (made,) = (node.args[0] for node in one.graph.nodes if node.op == "output")
    has_axis = [each.shape[:1] == (1,) for each in one(*(each[0] for each in given))]
    if any(each.op != "get_attr" and not axis for each, axis in zip(made, has_axis, strict=True)):
        raise NotTraced

    def one_by_one(*all_given: Tensor) -> list[Tensor]:
        columns = zip(*(one(*each) for each in zip(*all_given, strict=True)), strict=True)
        return [torch.cat(each) if axis else each[0] for each, axis in zip(columns, has_axis, strict=True)]

    def at_once(*all_given: Tensor) -> list[Tensor]:
        results = torch.func.vmap(one, out_dims=[0 if axis else None for axis in has_axis])(*all_given)
        return [each.flatten(0, 1) if axis else each for each, axis in zip(results, has_axis, strict=True)]

    with suppress(NotTraced):
        graph = traced(at_once, given)
        if all(map(torch.equal, graph(*given), one_by_one(*given))):
            return graph.forward
    return one_by_one


def form_of(tensor: Tensor) -> tuple[object, ...]:
    # Strides as well: a reshape is traced as a view or as a copy.
    return tensor.shape, tensor.dtype, tensor.stride()


def stop_with(seen: list[dict[str, object]], named: dict[str, object]) -> None:
    seen.append(named)
    raise StopCall


def reads_values(node: Any) -> bool:
    """True if an operator may do something else where its tensors have other values, or draws at random."""
    if READS.isdisjoint(getattr(node.target, "tags", ())):
        return False
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    return any(each.meta["val"].dtype in (torch.bool, torch.uint8) for each in node.args[1] if each is not None)


def join_views(graph: Any) -> None:
    """Use a tensor itself in place of its copies, and one view of it in place of views of views."""
    aten, origins = torch.ops.aten, dict[Any, Any]()
    views = {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.expand.default}
    views |= {aten.clone.default, aten.repeat.default, aten.unbind.int, operator.getitem}
    for node in [each for each in graph.graph.nodes if each.target in views]:
        origin = origins.get(node.args[0], node.args[0])
        made, given = (only_tensor(each.meta["val"]) for each in (node, origin))
        if made is None or given is None or made.numel() != given.numel():
            continue
        if made.is_contiguous() and given.is_contiguous():
            view = origin
            if form_of(made) != form_of(given):
                with graph.graph.inserting_before(node):
                    view = graph.graph.call_function(aten.view.default, (origin, list(made.shape)))
                view.meta, origins[view] = {"val": made}, origin
            node.replace_all_uses_with(view)


def only_tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else value[0] if len(value) == 1 else None


def fold_constants(graph: Any) -> None:
    """Compute what depends on no input of a traced function."""
    from torch.fx.node import map_arg

    values: dict[Any, Any] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            values[node] = getattr(graph, node.target)
        elif node.op == "call_function" and all(each in values for each in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for number, (node, value) in enumerate(values.items()):
        if node.op == "call_function" and isinstance(value, Tensor) and any(each not in values for each in node.users):
            name = f"folded_{number}"
            graph.register_buffer(name, value, persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name), lambda user: user not in values)
