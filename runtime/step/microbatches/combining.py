"""Defines how the outputs of micro-batches combine to an output of the batch.

| output | combination |
|---|---|
| loss, gradients, floating-point auxiliary outputs | by `reduce`: sum, mean or weighted mean |
| integer auxiliary outputs | the sum, because the outputs are counts |
| auxiliary outputs with the batch as leading axis | joined, with the rows in the batch's order |
| auxiliary outputs in a collection `batch_stats` (`nnx.BatchStat`, `eqx.nn.State`) | the mean, for every `reduce` |
| integers and flags in a collection `batch_stats` | the value of the last micro-batch |
| values under a key `_overwrite_with_gradient` (Flax's fp8 histories and scales) | the largest, element by element |
| types with an addition of their own (Flax's `fp32_max_grad`) | the result of that addition |
| gradients of integers (float0) | unchanged |

Floating-point sums use float32 or wider. Complex sums use complex64 or wider. The result has the type of one
micro-batch's output, and is weakly typed if that output is. If outputs are `unreduced` over some mesh axes, their sums
are too.

Running statistics are averaged for this reason: each micro-batch starts from the same statistics and is normalized by
its own rows. The same holds for each device in Flax's data-parallel examples, which average the statistics of devices
(`jax.lax.pmean`). An update of the statistics is m * old + (1 - m) * new, and the mean over micro-batches is again one
such update. The running mean equals that of the whole batch. The running variance lacks the variance between the means
of micro-batches.

The largest fp8 values are taken for this reason: an amax history begins with the largest magnitude that the micro-batch
saw. The rest of the history and the scale follow from the history before the step, which is the same for all
micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat

OVERWRITTEN = "_overwrite_with_gradient"  # name of the collection in Flax
STATISTICS = "batch_stats"


class How(Enum):
    """The ways in which one output combines over micro-batches."""

    REDUCE = "by reduce="
    ADD = "sum"
    MEAN = "mean"
    LARGEST = "largest"
    LAST = "last"
    JOIN = "rows put together"
    OWN = "the addition of its type"
    NONE = "no numbers"


@dataclass(frozen=True)
class Combination:
    """How one output combines over micro-batches.

    Attributes:
      like: abstract value of the output of one micro-batch.
      how: the kind of combination.
    """

    like: Any
    how: How

    @property
    def summed(self) -> bool:
        """Whether a total is carried from one micro-batch to the next."""
        return self.how not in (How.JOIN, How.NONE)

    def start(self) -> jax.Array:
        """Returns the total before the first micro-batch. It has the sharding and the manual axes of the output."""
        if self.how is How.OWN:
            return ad.zeros_like_aval(self.like)
        zeros = ad.zeros_like_aval(self.like.update(dtype=sum_type(self.like.dtype), weak_type=False))
        return zeros - jnp.inf if self.how is How.LARGEST else zeros

    def add(self, total: jax.Array, value: Any, weight: jax.Array | None) -> jax.Array:
        """Adds a micro-batch's value to the total. `weight` is its weight if reduce="weighted", else None."""
        if self.how is How.OWN:
            return ad.add_jaxvals(total, value)
        value = jnp.asarray(value).astype(total.dtype)  # an auxiliary output may be a Python number
        if weight is not None and self.how is How.REDUCE:
            # A product alone is not enough: a micro-batch without tokens may have a loss of 0/0.
            value = jnp.where(weight == 0, jnp.zeros_like(value), value * _factor(weight, value))
        if self.how is How.LAST:
            return value
        if self.how is How.LARGEST:
            if weight is not None:
                value = jnp.where((weight == 0) & jnp.isnan(value), 0, value)
            return jnp.maximum(total, value)
        return total + value

    def finish(self, total: jax.Array, weight: jax.Array | None, count: int, reduce: str) -> jax.Array:
        """Returns the output of the batch. `weight` is the sum of all micro-batches' weights if reduce="weighted"."""
        if self.how is How.OWN:
            return total
        if self.how is How.REDUCE and weight is not None:
            total = total / _factor(jnp.where(weight == 0, 1, weight), total)  # if all weights are 0, the total is 0
        elif self.how is How.MEAN or (self.how is How.REDUCE and reduce == "mean"):
            total = total / _factor(count, total)
        return self.typed(total)

    def typed(self, value: jax.Array) -> jax.Array:
        """Returns `value`, converted to the type of the output."""
        return jax_compat.convert_element_type(value, self.like.dtype, self.like.weak_type)

    def nothing(self) -> np.ndarray:
        """Returns an output of type float0, which holds no numbers."""
        return np.zeros(self.like.shape, self.like.dtype)


def sum_type(dtype: Any) -> Any:
    """Returns the type in which numbers of type `dtype` are summed."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.promote_types(dtype, jnp.complex64)
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)  # promote_types rejects 8-bit floats
    return dtype


def comparable(value: Any) -> Any:
    """Returns `value`, summed over its unreduced mesh axes, in the type for sums; None if `value` is not a number."""
    like = jax.typeof(value)
    if like.dtype == jax.dtypes.float0 or jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return None
    spec = like.sharding.spec
    if spec.unreduced:
        value = jax.reshard(value, NamedSharding(like.sharding.mesh, PartitionSpec(*spec.partitions)))
    return jnp.asarray(value).astype(sum_type(like.dtype))


def of_gradients(grads: Sequence[Any], tree: Any) -> list[Combination]:
    """Returns the combinations of gradients. `grads` holds the abstract values of the leaves of `tree`."""
    return [Combination(like, _of_gradient(like, name)) for like, name in zip(grads, collections(tree), strict=True)]


def _of_gradient(like: Any, collection: str | None) -> How:
    if like.dtype == jax.dtypes.float0:
        return How.NONE
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return How.OWN
    return How.LARGEST if collection == OVERWRITTEN else How.REDUCE


def of_auxiliary(one: Sequence[Any], whole: Sequence[Any], tree: Any, count: int) -> list[Combination]:
    """Returns the combinations of auxiliary outputs.

    Args:
      one: abstract values of the outputs of one micro-batch.
      whole: abstract values of the outputs of the whole batch.
      tree: pytree of the outputs.
      count: number of micro-batches.

    Raises:
      DhelixError: an output cannot be combined. The message names the output.
    """
    names = collections(tree)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    each = zip(one, whole, names, paths, strict=True)
    return [Combination(like, _of_auxiliary(like, other, name, path, count)) for like, other, name, path in each]


def _of_auxiliary(one: Any, whole: Any, collection: str | None, path: Any, count: int) -> How:
    if one.shape == whole.shape:
        if collection == OVERWRITTEN and jnp.issubdtype(one.dtype, jnp.floating):
            return How.LARGEST
        if collection == STATISTICS and not jnp.issubdtype(one.dtype, jnp.inexact):
            return How.LAST  # all micro-batches start from the same count
        if jnp.issubdtype(one.dtype, jnp.inexact):
            return How.MEAN if collection == STATISTICS else How.REDUCE
        if jnp.issubdtype(one.dtype, jnp.integer):
            return How.ADD
    elif one.shape and (one.shape[0] * count, *one.shape[1:]) == whole.shape:
        return How.JOIN
    other = f" for a micro-batch and {list(whole.shape)} for the batch" if one.shape != whole.shape else ""
    raise DhelixError(
        f"aux{jax.tree_util.keystr(path)} is {one.dtype}{list(one.shape)}{other}, and {count} of them cannot be "
        "combined in one obvious way: return numbers (a flag as an integer), or arrays with the batch as leading "
        "axis, or compute it outside value_and_grad"
    )


def collections(tree: Any) -> list[str | None]:
    """Returns for each leaf of `tree` the Flax collection that it is in: OVERWRITTEN, STATISTICS or None.

    The collection follows from a key in the leaf's path, or from the type of its NNX variable. Equinox's State counts
    as STATISTICS.
    """
    nnx: Any = sys.modules.get("flax.nnx")  # already imported if the tree holds NNX variables
    equinox: Any = sys.modules.get("equinox")

    def is_variable(node: Any) -> bool:
        return nnx is not None and isinstance(node, nnx.Variable)

    def is_state(node: Any) -> bool:
        return equinox is not None and isinstance(node, equinox.nn.State)

    found: list[str | None] = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_variable(x) or is_state(x)):
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        if is_variable(node):
            names |= {STATISTICS} if isinstance(node, nnx.BatchStat) else {type(node).__name__}
        names |= {STATISTICS} if is_state(node) else set()
        name = next((name for name in (OVERWRITTEN, STATISTICS) if name in names), None)
        found += [name] * len(jax.tree.leaves(node))
    return found


def _factor(number: Any, of: jax.Array) -> jax.Array:
    """Returns `number` as an array by which `of` can be multiplied or divided. `of` may be unreduced over some axes."""
    number = jnp.asarray(number, of.dtype)
    like = jax.typeof(of)
    axes = like.sharding.spec.unreduced
    if axes:
        number = jax.reshard(number, NamedSharding(like.sharding.mesh, PartitionSpec(reduced=axes)))
    axes = like.manual_axis_type.unreduced
    return jax.lax.pcast(number, tuple(sorted(axes)), to="reduced") if axes else number
