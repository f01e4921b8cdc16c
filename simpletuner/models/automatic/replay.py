"""Replays of a pipeline's call: its tensor operators alone, traced once for each shape of what it is given.

The Python of a call costs 1 to 3 CPU ms per step, and some calls make pixels of a whole clip for a VAE that is never
run (Wan). What depends on shapes alone is computed once; what no input of the denoiser is made of is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.automatic.pipeline_run import FOREIGN_ERRORS, StopCall
from simpletuner.private_api.of_torch import TreeSpec, trace_operators, tree_flatten, tree_unflatten

Denoise = Callable[[dict[str, Any]], Any]
Run = Callable[[Sequence[Tensor], Denoise], Tensor | None]
"""A pipeline's call, given the noise, the time and all else that samples differ by; returns the prediction, None if
`denoise` ended it."""

READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


class NotTraced(Exception):
    """Raised for a call that may have other operators where it is given other values."""


@dataclass
class CallReplay:
    """A traced call: the denoiser's inputs, and the prediction that is made of its output."""

    run: Run
    examples: InitVar[Sequence[Tensor]]
    """Values that the call is given, of which shapes and dtypes matter."""
    leaves: list[Any] = field(default_factory=list)
    """The denoiser's inputs, flat; tensors are those of the last call."""
    structure: TreeSpec | None = None
    places: tuple[int, ...] = ()
    """Numbers of the tensors among the leaves."""
    variable: frozenset[int] = frozenset()
    """Numbers, among these tensors, of those that depend on what is given."""
    predictions: dict[Any, Callable[..., Tensor]] = field(default_factory=dict)

    def __post_init__(self, examples: Sequence[Tensor]) -> None:
        """Raises NotTraced."""
        self.inputs = self.traced(self.make_inputs, examples)
        (made,) = (node.args[0] for node in self.inputs.graph.nodes if node.op == "output")
        self.variable = frozenset(number for number, each in enumerate(made) if each.op != "get_attr")

    def predict(self, denoise: Denoise, given: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            inputs = self.inputs(*given)
        return self.prediction(given, denoise(self.named(inputs)))

    def predict_together(self, denoise: Denoise, samples: Sequence[Sequence[Tensor]]) -> Tensor:
        """Predict for several calls by one of the denoiser; one by one where an input has no axis for samples."""
        with torch.no_grad():
            each = [self.inputs(*given) for given in samples]
            joined = [self.joined(number, column) for number, column in enumerate(zip(*each, strict=True))]
        tensors = [tensor for tensor in joined if tensor is not None]
        if len(tensors) < len(joined):
            return torch.cat([self.predict(denoise, given) for given in samples])
        leaves, structure = tree_flatten(denoise(self.named(tensors)))
        parts = [each.split(1) if isinstance(each, Tensor) else [each] * len(samples) for each in leaves]
        outputs = [tree_unflatten(own, structure) for own in zip(*parts, strict=True)]
        return torch.cat([self.prediction(given, own) for given, own in zip(samples, outputs, strict=True)])

    def joined(self, number: int, column: Sequence[Tensor]) -> Tensor | None:
        """Return an input of all samples, None if one that differs between them has no axis for them."""
        first = column[0]
        if first.ndim and len(first) == 1:
            return torch.cat(column) if number in self.variable else first.expand(len(column), *first.shape[1:])
        return None if number in self.variable else first

    def make_inputs(self, *given: Tensor) -> list[Tensor]:
        seen: list[dict[str, Any]] = []
        self.run(given, lambda named: stop_with(seen, named))
        leaves, self.structure = tree_flatten(seen[0])
        self.places = tuple(number for number, each in enumerate(leaves) if isinstance(each, Tensor))
        self.leaves = [None if number in self.places else each for number, each in enumerate(leaves)]
        return [leaves[number] for number in self.places]

    def prediction(self, given: Sequence[Tensor], output: Any) -> Tensor:
        """Return the prediction that the call makes of the denoiser's output. Raises NotTraced."""
        made, structure = tree_flatten(output)
        key = (structure, *(form_of(each) if isinstance(each, Tensor) else each for each in made))
        tensors = [each for each in made if isinstance(each, Tensor)]
        if key not in self.predictions:

            def predict(*all_given: Tensor) -> Tensor:
                own = iter(all_given[len(given) :])
                leaves = [next(own) if isinstance(each, Tensor) else each for each in made]
                prediction = self.run(all_given[: len(given)], lambda _: tree_unflatten(leaves, structure))
                assert prediction is not None
                return prediction

            self.predictions[key] = self.traced(predict, [*given, *tensors])
        return self.predictions[key](*given, *tensors)

    def named(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the denoiser's inputs by name."""
        assert self.structure is not None
        leaves = list(self.leaves)
        for number, each in zip(self.places, tensors, strict=True):
            leaves[number] = each
        return tree_unflatten(leaves, self.structure)

    def traced(self, function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        try:
            with torch.no_grad():
                graph = trace_operators(function, [each.detach() for each in given])
        except torch.OutOfMemoryError:
            raise
        except (SettingsError, *FOREIGN_ERRORS) as error:  # a value is read, or numpy is used
            raise NotTraced from error
        if any(reads_values(node) for node in graph.graph.nodes):
            raise NotTraced
        fold_constants(graph)
        return graph


def form_of(tensor: Tensor) -> tuple[object, ...]:
    # Strides as well: a reshape is traced as a view or as a copy.
    return tensor.shape, tensor.dtype, tensor.stride()


def stop_with(seen: list[dict[str, Any]], named: dict[str, Any]) -> None:
    seen.append(named)
    raise StopCall


def reads_values(node: Any) -> bool:
    """True if an operator may do something else where its tensors have other values, or draws at random."""
    if READS.isdisjoint(getattr(node.target, "tags", ())):
        return False
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    return any(each.meta["val"].dtype in (torch.bool, torch.uint8) for each in node.args[1] if each is not None)


def fold_constants(graph: Any) -> None:
    """Compute what depends on no input of a traced function, and leave out what nothing is made of."""
    from torch.fx.node import map_arg

    graph.graph.eliminate_dead_code()
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
    graph.graph.eliminate_dead_code()
    graph.recompile()
