"""What a train step at hand says about its model states: real bytes per parameter, and the sizes of layers.

    found = StepSizes.of(lowered, args, axes=("dp",))
    found.kept.optimizer           # bytes of optimizer states per parameter, of any Optax optimizer
    found.sizes.layers             # stacked or repeated layers
    found.parts                    # the same of groups of parameters, by their paths (`parameter_groups.py`)

The program says which arguments are parameters and which are optimizer states (`find_states`). Layers are arrays whose
paths differ in a number alone, or else stacks: arrays with a leading dimension of layers. Compute of a part
of the model is assumed to be proportional to its parameters. A table as large as the head, such as an embedding, is
assumed to compute nothing. A table that the program only looks up may exchange rows (`Module.exchanged`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dhelix.passes import jax_compat
from dhelix.passes.analysis.collectives import flattened_groups, payloads
from dhelix.passes.hlo import HloModule, shapes
from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.sharding.factors import ShardingError
from dhelix.passes.sharding.groups import OTHERS
from dhelix.passes.sharding.sizes import OPS_PER_PARAMETER, ModelSizes, Module, StateBytes
from dhelix.passes.sharding.states.look_ups import rows_read
from dhelix.passes.sharding.states.updates import find_states
from dhelix.runtime.compiler import lowering
from dhelix.runtime.sharding.parameter_groups import group_numbers, paths_of
from dhelix.runtime.sharding.placed_states import axes_of, stacks

_SUMS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class StepSizes:
    """The states of a step, as one device holds them without data-parallel sharding.

    Attributes:
      sizes: layers and their parameters. Operations are in proportion to parameters.
      kept: bytes per parameter.
      states: numbers of the arguments (leaves of the step's arguments, in order) that are states.
      split: whether data-parallel axes split some states already.
      trained: the share of parameters that have gradients. Bytes of gradients per parameter count the others, too.
      parts: sizes and bytes of each group, the others last; empty without groups.
      rows: rows of the largest table that a device looks up in a step; 0 if the table is read otherwise.
    """

    sizes: ModelSizes
    kept: StateBytes
    states: frozenset[int]
    split: bool
    trained: float = 1.0
    parts: tuple[tuple[ModelSizes, StateBytes], ...] = ()
    rows: int = 0

    @classmethod
    def of(
        cls, lowered: jax.stages.Lowered, args: Sequence[Any], axes: Axes, name: str, keys: Sequence[str] = ()
    ) -> StepSizes:
        """The states of a lowered step.

        Args:
          args: the arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
          axes: the data-parallel mesh axes.
          name: name of the model.
          keys: keys of groups of parameters.

        Raises:
          ShardingError: the step has no new state among its results, or optimizer states without parameters, or a key
            matches no parameter.
        """
        module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
        found = find_states(module)
        kept = jax_compat.kept_arguments(lowered)
        leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
        parameters, others = ([kept[n] for n in numbers] for numbers in (found.parameters, found.optimizer))
        _check(parameters, others)
        frozen = {kept[n] for n in found.frozen}

        def of_states(numbers: Sequence[int], owned: Sequence[int]) -> tuple[StateBytes, float]:
            phi = sum(_elements(leaves[n][1], axes) for n in numbers)
            trained = sum(_elements(leaves[n][1], axes) for n in numbers if n not in frozen) / phi
            size, gradient = _bytes(leaves, numbers, axes) / phi, found.gradient * trained
            moved, held = min(size, float(found.computed)), _bytes(leaves, owned, axes) / phi
            return StateBytes(size, gradient, held, moved, gradient, copied=moved < size), trained

        states, trained = of_states(parameters, others)
        looked_up = {leaves[kept[n]][0]: rows for n, rows in rows_read(module).items() if n in found.parameters}
        layout = _Layout.of([leaves[n] for n in parameters], stacks(tuple(args)), axes, looked_up)
        parts = []
        for key, ours in _in_groups(keys, args, (parameters, others)):
            if not ours[0]:
                raise ShardingError(
                    f"group {key!r} matches no parameter that the step returns: return it with the new state"
                )
            parts.append((layout.sizes(key, {leaves[n][0] for n in ours[0]}), of_states(*ours)[0]))
        every = frozenset((*parameters, *others))
        split = any(_parts(leaves[n][1], axes, True) > 1 for n in every)
        rows = looked_up.get(layout.largest, 0) // math.prod(mesh_of_arguments(args).shape[axis] for axis in axes)
        return cls(layout.sizes(name), states, every, split, trained, tuple(parts), rows)

    def summed(self, width: float) -> StepSizes:
        """The same, if devices sum gradients in a type of `width` bytes."""

        def of(kept: StateBytes) -> StateBytes:
            return replace(kept, moved_gradient=kept.gradient * min(width / self.gradient, 1.0))

        return replace(self, kept=of(self.kept), parts=tuple((sizes, of(kept)) for sizes, kept in self.parts))

    @property
    def gradient(self) -> float:
        """Bytes of a gradient."""
        return self.kept.gradient / self.trained if self.trained else 1.0


def _in_groups(
    keys: Sequence[str], args: Sequence[Any], states: tuple[Sequence[int], Sequence[int]]
) -> Iterator[tuple[str, tuple[list[int], list[int]]]]:
    """The parameters and optimizer states of each group, and of the others if there are any."""
    if not keys:
        return
    numbers = group_numbers(keys, paths_of(tuple(args)))
    for number, key in [*enumerate(keys), (None, OTHERS)]:
        parameters, others = ([n for n in each if numbers[n] == number] for each in states)
        if parameters or number is not None:
            yield key, (parameters, others)


def _check(parameters: Collection[int], others: Collection[int]) -> None:
    if parameters:
        return
    if others:
        raise ShardingError(
            f"the step has {len(others)} optimizer states and no parameters: no state is read outside of the "
            "optimizer's update; give a step that computes gradients of its parameters"
        )
    raise ShardingError(
        "the step returns no new state: none of its results is computed element by element from an argument; return "
        "the new parameters and optimizer states"
    )


def _bytes(leaves: Sequence[tuple[Any, Any]], numbers: Sequence[int], axes: Axes) -> float:
    return float(sum(_elements(leaves[n][1], axes) * leaves[n][1].dtype.itemsize for n in numbers))


def _elements(leaf: Any, axes: Axes) -> int:
    """Elements of an array on one device, if the data-parallel axes split nothing."""
    return math.prod(np.shape(leaf)) // _parts(leaf, axes, False)


def _parts(leaf: Any, axes: Axes, data: bool) -> int:
    """Into how many parts the mesh axes split an array: those in `axes` if `data`, else the others."""
    names = [name for entry in axes_of(leaf) for name in entry]
    return math.prod(leaf.sharding.mesh.shape[name] for name in names if (name in axes) == data)


@dataclass(frozen=True)
class _Layout:
    """Where the parameters of a step are: in layers, or outside of them.

    Attributes:
      elements: the elements of each parameter, by its path; of all layers together.
      layers: number of layers.
      inside: the paths of what is in layers.
      largest: the path of the largest array outside of layers; None if all parameters are in layers.
      rows: rows of this array, if it is only looked up, and split over data-parallel axes alone; else 0.
    """

    elements: dict[Any, int]
    layers: int
    inside: frozenset[Any]
    largest: Any
    rows: int = 0

    @classmethod
    def of(
        cls,
        parameters: Sequence[tuple[Any, Any]],
        stacked: Collection[Any],
        axes: Axes,
        looked_up: Collection[Any] = (),
    ) -> _Layout:
        """The layout of parameters, which are paths with arrays. Those in `looked_up` are only looked up."""
        alike = Counter(_without_numbers(path) for path, _ in parameters)
        layers_of = {path: alike[_without_numbers(path)] for path, _ in parameters if alike[_without_numbers(path)] > 1}
        for path, leaf in parameters:
            if path not in layers_of and (path in stacked or np.ndim(leaf) > 2):
                layers_of[path] = np.shape(leaf)[0]
        elements = {path: _elements(leaf, axes) for path, leaf in parameters}
        weights = Counter[int]()
        for path, count in layers_of.items():
            weights[count] += elements[path]
        layers = max(weights, key=lambda count: weights[count], default=1)
        inside = frozenset(path for path, count in layers_of.items() if count == layers) or frozenset(elements)
        outside = [path for path in elements if path not in inside]
        largest = max(outside, key=lambda path: (elements[path], path in looked_up), default=None)
        tables = {path: leaf for path, leaf in parameters if path in looked_up and _parts(leaf, axes, False) == 1}
        rows = np.shape(tables[largest])[0] if largest in tables else 0
        return cls(elements, layers, inside, largest, rows)

    def sizes(self, name: str, group: Collection[Any] | None = None) -> ModelSizes:
        """The sizes of the model: layers, the largest array outside of them, and the rest.

        Args:
          group: the paths of a group, whose parameters alone are counted; None: all.
        """
        inside, first, rest = self._counts(self.elements)
        layer = Module("layer", inside, OPS_PER_PARAMETER * inside)
        flops = 0.0 if 2 * rest > first else OPS_PER_PARAMETER * first
        table = Module("largest array outside", first, flops, self.rows)
        ends = (table, Module("others outside", rest, OPS_PER_PARAMETER * rest)) if self.largest is not None else ()
        found = ModelSizes(name, self.layers, (layer,), ends, hidden=1)
        if group is None:
            return found
        inside, *outside = self._counts(group)
        return found.only(name, [inside], outside[: len(ends)])

    def _counts(self, paths: Collection[Any]) -> tuple[int, int, int]:
        """How many parameters of a layer, of the largest array outside and of the rest are at these paths."""
        inside = sum(self.elements[path] for path in paths if path in self.inside) // self.layers
        first = self.elements[self.largest] if self.largest in paths else 0
        return inside, first, sum(self.elements[path] for path in paths if path not in self.inside) - first


def _without_numbers(path: Any) -> str:
    return re.sub(r"\d+", "#", jax.tree_util.keystr(path))


def summed_bytes(module: HloModule, mesh: Mesh, axes: Axes, gradient: float) -> float:
    """Bytes per gradient that a sum over data-parallel devices moves in a compiled plain step.

    XLA's partitioner sums gradients in the type in which a layer makes them, such as bfloat16. The type in which most
    bytes are summed counts, and never one that is wider than the gradients. Without such sums, it is theirs.

    Args:
      axes: the data-parallel axes of `mesh`.
      gradient: bytes of a gradient.
    """
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    places = [mesh.axis_names.index(axis) for axis in axes]
    rows = np.moveaxis(numbers, places, range(-len(places), 0)).reshape(-1, math.prod(mesh.shape[a] for a in axes))
    groups = {frozenset(map(int, row)) for row in rows}
    summed = Counter[float]()
    for computation in module.computations:
        for reduction in (one for i in computation.instructions for one in payloads(i)):
            kind = reduction.opcode.removesuffix("-start")
            if kind in _SUMS and {frozenset(group) for group in flattened_groups(reduction)} == groups:
                for operand in reduction.operands:
                    elements = shapes.element_count(operand.shape)
                    summed[shapes.byte_size(operand.shape) / max(elements, 1)] += shapes.byte_size(operand.shape)
    widest = max(summed, key=lambda width: summed[width], default=gradient)
    return min(widest, gradient)


def mesh_of_arguments(args: Any) -> Mesh:
    """The mesh that the arguments are placed on.

    Raises:
      ShardingError: they are on none.
    """
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    raise ShardingError(
        "the step's arguments are on no mesh: give arrays, or jax.ShapeDtypeStructs with shardings over a mesh of GPUs"
    )
