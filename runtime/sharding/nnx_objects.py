"""Objects of Flax NNX as states: the paths of their arrays in a lowered step, and variables that they share.

`nnx.jit` takes the arrays out of objects, and hands on lists of them (`nnx.NodeStates`). So their paths in a lowered
step are mere numbers. The names stand beside each list, in the graph of the objects. The objects are made again, with
numbers in place of arrays. The place of a number is the path of its array.
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from dhelix.passes.sharding.factors import ShardingError
from dhelix.runtime.sharding.parameter_groups import LeafPath, paths_of


def argument_paths(arguments: Any) -> list[LeafPath]:
    """The path of each argument of a lowered step, in order.

    Args:
      arguments: `args_info` of the lowered step, or another tree of the same structure.

    Returns:
      Paths as `paths_of` returns them. A variable that objects share has the first of its paths.
    """
    paths, nnx = paths_of(arguments), _nnx()
    if nnx is None:
        return paths
    structure = jax.tree.structure(arguments)
    numbers = jax.tree.unflatten(structure, range(structure.num_leaves))
    objects = nnx.from_tree(numbers, merge_fn=_made_again)
    # An object with pytree=False is a leaf for JAX. Its state is a tree with the same names.
    named = jax.tree.map(lambda leaf: leaf if isinstance(leaf, int) else nnx.state(leaf, graph=True), objects)
    found = dict[int, LeafPath]()
    for path, number in zip(paths_of(named), jax.tree.leaves(named), strict=True):
        found.setdefault(number, path)
    return [found[number] for number in range(len(paths))]


def unwrapped(lowered: Any) -> jax.stages.Lowered:
    """The lowered step of arrays that `nnx.jit` made of a step of objects; other lowered steps as they are."""
    return getattr(lowered, "lowered", lowered)


def _made_again(context: Any, path: Any, prefix: Any, split: Any) -> Any:
    """The object that was split into an `nnx.NodeStates`. `context` is an `nnx.MergeContext`."""
    return context.unflatten(split.graphdef, *split.states)


def check_unshared(state: Any) -> None:
    """Refuses objects that share a variable, which a copy of their tree would have twice.

    Raises:
      ShardingError: a variable has several paths.
    """
    nnx, seen = _nnx(), dict[int, str]()
    if nnx is None:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, nnx.Variable) and seen.setdefault(id(leaf), text) != text:
            raise ShardingError(
                f"{seen[id(leaf)]} and {text} are one variable, and would become two; place the objects in shards with "
                "nnx.update(objects, shard_state(nnx.state(objects), plan))"
            )


def _nnx() -> Any:
    """The module `flax.nnx`; None if the program has not imported it, and so has no objects."""
    return sys.modules.get("flax.nnx")
