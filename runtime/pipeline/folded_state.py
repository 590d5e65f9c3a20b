"""A train state whose layers lie in the order of a pipeline, and the way back to the model's own order.

A model that is a scan over layers stacks their parameters. A pipeline keeps them chunk by chunk, the chunks stage by
stage, each padded with zeros to the length of the longest; so a stage holds its own layers and no others.

    8 layers on 2 stages, U layout       model's order                    folded
    wq                                   [8, hidden, heads, head_dim]     [4, 2, hidden, heads, head_dim]
                                         P(None, "pp", "tp")              P("pp", None, None, "tp")
                                         0 1 2 3 4 5 6 7                  (0 1)(6 7) on stage 0, (2 3)(4 5) on stage 1

Folding adds a dimension, so a state in the wrong order has the wrong rank and does not compute anything by accident.
Checkpoints hold the model's order: they know nothing of stages, and any number of them reads them.

Contract. `stacked` names what is stacked, by key paths relative to the parameters: a leaf, `("layers", "wq")`, or all
that lies under a name, `("layers",)`. In a state every array whose path contains one of them and whose leading
dimension is the number of layers is changed: parameters, and moments of the optimizer, which lie under the same names.
All else stays as it is. The round trip is exact. Padding is zero, has zero gradients, and stays zero under optimizers
that work element by element or with norms; not under those that take means over an array (Adafactor's clipping) or
treat an array as one matrix. What asks for the number of dimensions, as masks of weight decay do, finds one more.

Cost. Stages have their share of the arrays in the model's order too, along another dimension, the first after the
layers that divides: so folding is a permutation on each device and one all-to-all, and no device ever holds a whole
stack. Both orders are in memory while one is made of the other.

DHelix paper, section 4.1 (model folding); the permutation is `passes.pipeline_fold.layouts.storage_order`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes.pipeline_fold.layouts import model_order, storage_order
from dhelix.passes.pipeline_fold.schedule import Layout

Path = tuple[str | int, ...]


def fold_leaf(x: jax.Array, layout: Layout) -> jax.Array:
    """Stacked layers `[L, ...]` as the pipeline keeps them, `[chunks, padded, ...]`; padding is zero."""
    order = storage_order(layout).reshape(layout.chunks, layout.padded)
    return x.at[order].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def unfold_leaf(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `fold_leaf`: `[chunks, padded, ...]` to `[L, ...]`."""
    return x.reshape(-1, *x.shape[2:])[model_order(layout)]


def fold_state(state: Any, stacked: tuple[Path, ...], layout: Layout, mesh: Mesh, axis: str = "pp") -> Any:
    """`state` with its stacked layers in the pipeline's order, split over mesh axis `axis` by stages.

    Args:
      state: a pytree of arrays, or of `jax.ShapeDtypeStruct`s, whose stacked layers are `[L, ...]`.
      stacked: what is stacked (see above).
      layout: which layers lie on which stage.
      mesh: has `axis`, of as many devices as the layout has stages. Other axes that an array is split over by its
        `NamedSharding` stay.

    Raises DhelixError: nothing under a path of `stacked` is layers in the model's order; the mesh is another one.
    """
    return _move_state(state, stacked, Move(layout, mesh, axis, fold=True))


def unfold_state(state: Any, stacked: tuple[Path, ...], layout: Layout, mesh: Mesh, axis: str = "pp") -> Any:
    """The inverse of `fold_state`: stacked layers `[chunks, padded, ...]` become `[L, ...]`, in the model's order."""
    return _move_state(state, stacked, Move(layout, mesh, axis, fold=False))


def leading_dimensions(state: Any, stacked: tuple[Path, ...], count: int) -> tuple[int, ...]:
    """The first `count` dimensions of the first stack. Raises DhelixError where nothing lies under these names."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if len(getattr(leaf, "shape", ())) >= count and any(_lies_under(path, names) for names in stacked):
            return tuple(leaf.shape[:count])
    names = ", ".join(".".join(map(str, path)) for path in stacked)
    raise DhelixError(f"no array lies under {names}: name where the stacked layers are")


@dataclass(frozen=True)
class Move:
    """From one order to the other, on a mesh."""

    layout: Layout
    mesh: Mesh
    axis: str
    fold: bool

    @property
    def before(self) -> tuple[int, ...]:
        """Leading dimensions of stacked layers in the order that is left."""
        return self._leading(not self.fold)

    @property
    def after(self) -> tuple[int, ...]:
        return self._leading(self.fold)

    def _leading(self, folded: bool) -> tuple[int, ...]:
        return (self.layout.chunks, self.layout.padded) if folded else (self.layout.layers,)

    def applies(self, leaf: Any) -> bool:
        return getattr(leaf, "shape", ())[: len(self.before)] == self.before

    def abstract(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        own = leaf.shape[len(self.before) :]
        sharding = NamedSharding(self.mesh, self.spec(self.rest(leaf), own))
        return jax.ShapeDtypeStruct((*self.after, *own), leaf.dtype, sharding=sharding)

    def array(self, x: jax.Array, rest: PartitionSpec) -> jax.Array:
        """A stack in the other order; in between every device has all layers of its part of a layer."""
        own = x.shape[len(self.before) :]
        spread = self.spread(rest, own)
        x = self._constrain(x, PartitionSpec(*(None for _ in self.before), *spread))
        x = (fold_leaf if self.fold else unfold_leaf)(x, self.layout)
        x = self._constrain(x, PartitionSpec(*(None for _ in self.after), *spread))
        return self._constrain(x, self.spec(rest, own))

    def rest(self, leaf: Any) -> PartitionSpec:
        """How one layer is split, over the stages aside."""
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return _shorten(tuple(_without(entry, self.axis) for entry in spec[len(self.before) :]))

    def spec(self, rest: PartitionSpec, own: tuple[int, ...]) -> PartitionSpec:
        """How a stack in the new order is split; `own` is the shape of one layer."""
        return _shorten((self.axis, None, *rest) if self.fold else (None, *self.spread(rest, own)))

    def spread(self, rest: PartitionSpec, own: tuple[int, ...]) -> PartitionSpec:
        """`rest` with the stages' axis at the first dimension that is free and divides; without, if none does."""
        entries = [*rest, *(None for _ in own[len(rest) :])]
        for i, size in enumerate(own):
            if entries[i] is None and size % self.layout.stages == 0:
                entries[i] = self.axis
                break
        return _shorten(tuple(entries))

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _move_state(state: Any, stacked: tuple[Path, ...], move: Move) -> Any:
    if move.mesh.shape.get(move.axis) != move.layout.stages:
        raise DhelixError(
            f"a layout of {move.layout.stages} stages needs a mesh with an axis {move.axis!r} of that size, and the "
            f"mesh is {dict(move.mesh.shape)}"
        )
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves = [leaf for _, leaf in paths_and_leaves]
    chosen = [
        i
        for i, (path, leaf) in enumerate(paths_and_leaves)
        if any(_lies_under(path, names) for names in stacked) and move.applies(leaf)
    ]
    for names in stacked:
        if not any(_lies_under(paths_and_leaves[i][0], names) for i in chosen):
            order = "the model's" if move.fold else "the pipeline's"
            raise DhelixError(
                f"no array under {'.'.join(map(str, names))} has the leading dimensions {list(move.before)} of "
                f"{move.layout.layers} layers in {order} order on {move.layout.stages} stages; name what is stacked, "
                f"and {'fold' if move.fold else 'unfold'} a state once"
            )
    for i in chosen:
        _check_devices(*paths_and_leaves[i], move.mesh)
        abstract = isinstance(leaves[i], jax.ShapeDtypeStruct)
        leaves[i] = move.abstract(leaves[i]) if abstract else move_array(leaves[i], move, move.rest(leaves[i]))
    return structure.unflatten(leaves)


def _check_devices(path: tuple[Any, ...], leaf: Any, mesh: Mesh) -> None:
    """As of an array that was restored from a checkpoint to one device."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
        return
    if leaf.sharding.device_set != set(mesh.devices.flat):
        raise DhelixError(
            f"{jax.tree_util.keystr(path)} lies on {len(leaf.sharding.device_set)} of the devices, and not on the"
            f" {mesh.size} of the mesh: put the whole state there first, jax.device_put(state, NamedSharding(mesh,"
            " PartitionSpec(...)))"
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def move_array(stack: jax.Array, move: Move, rest: PartitionSpec) -> jax.Array:
    """`move.array`, compiled; array by array, so that what it needs beside its result is as much as one of them."""
    return move.array(stack, rest)


def _lies_under(path: tuple[Any, ...], names: Path) -> bool:
    """Whether `names` stand one after another in the key path of a leaf."""
    keys = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]
    return any(tuple(keys[i : i + len(names)]) == names for i in range(len(keys) - len(names) + 1))


def _without(entry: Any, axis: str) -> Any:
    """An entry of a PartitionSpec without one mesh axis."""
    left = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != axis)
    return left if len(left) > 1 else left[0] if left else None


def _shorten(entries: tuple[Any, ...]) -> PartitionSpec:
    """Without the Nones at the end, which say nothing and would make equal shardings unequal."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)
