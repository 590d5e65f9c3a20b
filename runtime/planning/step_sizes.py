"""What a train step at hand says about its model states: real bytes per parameter, and the sizes of layers.

    found = StepSizes.of(lowered, args, axes=("dp",))
    found.kept.optimizer           # bytes of optimizer states per parameter, of any Optax optimizer
    found.sizes.layers             # stacked or repeated layers

The program says which arguments are parameters and which are optimizer states (`find_states`). Layers are arrays whose
paths differ in a number alone, or else stacks: arrays with a leading dimension of layers. Compute of a part
of the model is assumed to be proportional to its parameters. A table as large as the head, such as an embedding, is
assumed to compute nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dhelix.passes import jax_compat
from dhelix.passes.analysis.collectives import flattened_groups, payloads
from dhelix.passes.hlo import HloModule, shapes
from dhelix.passes.hlo.constraints import Axes
from dhelix.passes.sharding.factors import ShardingError
from dhelix.passes.sharding.sizes import OPS_PER_PARAMETER, ModelSizes, Module, StateBytes
from dhelix.passes.sharding.states.updates import find_states
from dhelix.runtime.compiler import lowering
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
    """

    sizes: ModelSizes
    kept: StateBytes
    states: frozenset[int]
    split: bool

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, args: Sequence[Any], axes: Axes, name: str) -> StepSizes:
        """The states of a lowered step.

        Args:
          args: the arguments of the step, arrays or `jax.ShapeDtypeStruct`s.
          axes: the data-parallel mesh axes.
          name: name of the model.

        Raises:
          ShardingError: the step has no new state among its results, or optimizer states without parameters.
        """
        found = find_states(HloModule.from_bytes(lowering.hlo_bytes(lowered)))
        kept = jax_compat.kept_arguments(lowered)
        leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
        parameters, others = ([kept[n] for n in numbers] for numbers in (found.parameters, found.optimizer))
        _check(parameters, others)
        phi = sum(_elements(leaves[n][1], axes) for n in parameters)
        size = _bytes(leaves, parameters, axes) / phi
        moved = min(size, float(found.computed))
        states = StateBytes(
            parameter=size,
            gradient=float(found.gradient),
            optimizer=_bytes(leaves, others, axes) / phi,
            moved_parameter=moved,
            moved_gradient=float(found.gradient),
            copied=moved < size,
        )
        sizes = _sizes(name, [leaves[n] for n in parameters], stacks(tuple(args)), axes)
        every = frozenset((*parameters, *others))
        split = any(_parts(leaves[n][1], axes, True) > 1 for n in every)
        return cls(sizes, states, every, split)


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


def _sizes(name: str, parameters: Sequence[tuple[Any, Any]], stacked: Collection[Any], axes: Axes) -> ModelSizes:
    """The sizes of layers, and of what is outside of layers: the largest array first, then the rest."""
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
    inside = sum(elements[path] for path, count in layers_of.items() if count == layers)
    outside = sorted((n for path, n in elements.items() if layers_of.get(path) != layers), reverse=True)
    if not inside:
        inside, outside = sum(elements.values()), []
    layer = Module("layer", inside // layers, OPS_PER_PARAMETER * inside / layers)
    first, rest = sum(outside[:1]), sum(outside[1:])
    table = Module("largest array outside", first, 0.0 if 2 * rest > first else OPS_PER_PARAMETER * first)
    ends = (table, Module("others outside", rest, OPS_PER_PARAMETER * rest)) if outside else ()
    return ModelSizes(name, layers, (layer,), ends, hidden=1)


def _without_numbers(path: Any) -> str:
    return re.sub(r"\d+", "#", jax.tree_util.keystr(path))


def summed_bytes(module: HloModule, mesh: Mesh, axes: Axes, kept: StateBytes) -> float:
    """Bytes per gradient that a sum over data-parallel devices moves in a compiled plain step.

    XLA's partitioner sums gradients in the type in which a layer makes them, such as bfloat16. The type in which most
    bytes are summed counts, and never one that is wider than the gradients. Without such sums, it is that of `kept`.

    Args:
      axes: the data-parallel axes of `mesh`.
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
    widest = max(summed, key=lambda width: summed[width], default=kept.moved_gradient)
    return min(widest, kept.moved_gradient)


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
