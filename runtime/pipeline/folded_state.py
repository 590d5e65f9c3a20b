"""Folds a train state: puts its layers into a pipeline's order, and back into the model's own order.

A model that scans over its layers stacks their parameters in arrays. A pipeline orders the layers in these arrays by
stage and chunk, so that a stage holds only its own layers. Each chunk is padded with zeros to the longest chunk's
length.

    8 layers in 4 chunks on 2 stages     model's order                    folded
    wq                                   [8, hidden, heads, head_dim]     [4, 2, hidden, heads, head_dim]
                                         P(None, "pp", "tp")              P("pp", None, None, "tp")
                                         0 1 2 3 4 5 6 7                  (0 1)(6 7) on stage 0, (2 3)(4 5) on stage 1

Folding adds a dimension. So a state in the wrong order has the wrong rank and raises an error, instead of giving wrong
results. Checkpoints hold the model's order, so any number of stages can read them.

Contract:
- `stacked` names the stacked arrays by key paths relative to the parameters. A path leads to one array, such as
  `("layers", "wq")`, or to all arrays under a name, such as `("layers",)`.
- An array of the state changes if its path contains one of these paths and its leading dimension is the number of
  layers. So parameters change, and so do optimizer moments, which have the same names in their paths. All other arrays
  stay as they are.
- Unfolding a folded state gives exactly the original state.
- Padding is zero and has zero gradients. It stays zero under optimizers that work element by element or with norms. It
  does not stay zero under optimizers that average over an array (Adafactor's clipping) or treat an array as one matrix.
- Code that reads the number of dimensions, such as weight-decay masks, finds one dimension more.

Cost: arrays in the model's order are also sharded over the stages. The sharded dimension is the first dimension of a
layer that has no sharding yet and is divisible by the number of stages. So folding is a permutation on each device and
one all-to-all, and no device holds a whole stack. During the folding of an array, memory holds the array in both
orders.

DHelix section 4.1 (arXiv 2411.15871) calls this model folding. `passes.pipeline_fold.layouts.storage_order` defines the
permutation.
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
    """Returns stacked layers `[L, ...]` in the pipeline's order, `[chunks, padded, ...]`. Padding is zero."""
    order = storage_order(layout).reshape(layout.chunks, layout.padded)
    return x.at[order].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def unfold_leaf(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `fold_leaf`: `[chunks, padded, ...]` to `[L, ...]`."""
    return x.reshape(-1, *x.shape[2:])[model_order(layout)]


def fold_state(state: Any, stacked: tuple[Path, ...], layout: Layout, mesh: Mesh, axis: str = "pp") -> Any:
    """Returns `state` with its stacked layers in the pipeline's order, sharded over mesh axis `axis` by stages.

    Args:
      state: a pytree of arrays or of `jax.ShapeDtypeStruct`s. Its stacked layers have the shape `[L, ...]`.
      stacked: paths of the stacked arrays (see the module).
      layout: which layers each stage holds.
      mesh: the mesh. The size of its axis `axis` is the number of stages. The sharding of an array over other axes is
        kept.
      axis: the mesh axis of the stages.

    Raises:
      DhelixError: there are no layers in the model's order under a path of `stacked`, the number of stages is not the
        size of `axis`, or an array is on other devices than the mesh.
    """
    return _move_state(state, stacked, Move(layout, mesh, axis, fold=True))


def unfold_state(state: Any, stacked: tuple[Path, ...], layout: Layout, mesh: Mesh, axis: str = "pp") -> Any:
    """The inverse of `fold_state`: stacked layers `[chunks, padded, ...]` become `[L, ...]`, in the model's order."""
    return _move_state(state, stacked, Move(layout, mesh, axis, fold=False))


def leading_dimensions(state: Any, stacked: tuple[Path, ...], count: int) -> tuple[int, ...]:
    """Returns the first `count` dimensions of the first array under the paths `stacked`.

    Raises:
      DhelixError: there is no array with so many dimensions under these paths.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if len(getattr(leaf, "shape", ())) >= count and any(_lies_under(path, names) for names in stacked):
            return tuple(leaf.shape[:count])
    names = ", ".join(".".join(map(str, path)) for path in stacked)
    raise DhelixError(f"there is no array at {names}: give the paths of the stacked layers")


@dataclass(frozen=True)
class Move:
    """The change from the model's order to the pipeline's order (`fold=True`), or back, on a mesh."""

    layout: Layout
    mesh: Mesh
    axis: str
    fold: bool

    @property
    def before(self) -> tuple[int, ...]:
        """The leading dimensions of stacked layers before the change of order."""
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
        """Returns the stack `x` in the other order.

        For the permutation, the stack is sharded within layers only, so every device holds a part of each layer.
        """
        own = x.shape[len(self.before) :]
        spread = self.spread(rest, own)
        x = self._constrain(x, PartitionSpec(*(None for _ in self.before), *spread))
        x = (fold_leaf if self.fold else unfold_leaf)(x, self.layout)
        x = self._constrain(x, PartitionSpec(*(None for _ in self.after), *spread))
        return self._constrain(x, self.spec(rest, own))

    def rest(self, leaf: Any) -> PartitionSpec:
        """The sharding of one layer over all mesh axes except the stages' axis."""
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return _shorten(tuple(_without(entry, self.axis) for entry in spec[len(self.before) :]))

    def spec(self, rest: PartitionSpec, own: tuple[int, ...]) -> PartitionSpec:
        """The sharding of a stack after the change of order. `own` is the shape of one layer."""
        return _shorten((self.axis, None, *rest) if self.fold else (None, *self.spread(rest, own)))

    def spread(self, rest: PartitionSpec, own: tuple[int, ...]) -> PartitionSpec:
        """Adds the stages' axis to `rest`, at the first unsharded dimension that is divisible by the number of stages.

        If there is no such dimension, the result is `rest`.
        """
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
            f"a layout of {move.layout.stages} stages needs a mesh axis {move.axis!r} of that size, but the mesh is "
            f"{dict(move.mesh.shape)}"
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
                f"{move.layout.layers} layers in {order} order on {move.layout.stages} stages; give the path of the "
                f"stacked layers, and {'fold' if move.fold else 'unfold'} a state only once"
            )
    for i in chosen:
        _check_devices(*paths_and_leaves[i], move.mesh)
        abstract = isinstance(leaves[i], jax.ShapeDtypeStruct)
        leaves[i] = move.abstract(leaves[i]) if abstract else move_array(leaves[i], move, move.rest(leaves[i]))
    return structure.unflatten(leaves)


def _check_devices(path: tuple[Any, ...], leaf: Any, mesh: Mesh) -> None:
    """Raises DhelixError if an array is on other devices than the mesh.

    For example, code may have restored the array from a checkpoint to a single device.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
        return
    if leaf.sharding.device_set != set(mesh.devices.flat):
        raise DhelixError(
            f"{jax.tree_util.keystr(path)} is on {len(leaf.sharding.device_set)} devices instead of the mesh's "
            f"{mesh.size}: put the whole state on the mesh first, jax.device_put(state, NamedSharding(mesh, "
            "PartitionSpec(...)))"
        )


@functools.partial(jax.jit, static_argnums=(1, 2))
def move_array(stack: jax.Array, move: Move, rest: PartitionSpec) -> jax.Array:
    """Runs `move.array` in a program for one array only. So at most one array at a time is in memory in both orders."""
    return move.array(stack, rest)


def _lies_under(path: tuple[Any, ...], names: Path) -> bool:
    """Whether the key path of a leaf contains `names` as consecutive keys."""
    keys = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]
    return any(tuple(keys[i : i + len(names)]) == names for i in range(len(keys) - len(names) + 1))


def _without(entry: Any, axis: str) -> Any:
    """An entry of a PartitionSpec, with mesh axis `axis` removed."""
    left = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name != axis)
    return left if len(left) > 1 else left[0] if left else None


def _shorten(entries: tuple[Any, ...]) -> PartitionSpec:
    """A PartitionSpec without trailing Nones. These have no meaning, but would make equal shardings unequal."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)
