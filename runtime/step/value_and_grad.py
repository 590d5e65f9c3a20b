"""`dhelix.value_and_grad`: JAX's, or a loop over micro-batches in a step that is decorated with one.

    loss, grads = dhelix.value_and_grad(loss_fn)(params, batch)

Outside a `strand_interleave(microbatches=M)` step this is `jax.value_and_grad`. Inside it becomes

    for m in range(M):  loss, grads += jax.value_and_grad(loss_fn)(params, batch[m::M])      (lax.scan)

which is the loop that the passes turn into two strands.

Rules
1. Batch arguments are split along axis 0 of every leaf, which M must divide. Micro-batch m takes the rows
   m, m + M, m + 2M, ...: a batch sharded over a mesh axis stays sharded over it in every micro-batch, and no
   row moves between devices. (Consecutive rows would put a micro-batch on a few devices.)
2. Losses and gradients add up in float32 or wider, and come back in the types of `jax.value_and_grad`.
3. They combine by `reduce`: "mean" or "sum" of the micro-batches' values, or "weighted": the mean weighted by
   `weights` (token counts). It must fit `loss_fn`: "mean" is wrong for a loss that divides by the number of
   unmasked tokens when micro-batches differ in it. `strand_interleave(verify=True)` tells.
4. An auxiliary output whose shape does not depend on the batch combines like the loss if it is floating
   point; if integer it is a count and adds up. One with the batch as leading axis is put together again.
5. Objects of Flax NNX and modules of Equinox are differentiated as their own `value_and_grad`s do it
   (`frameworks.gradients`). What the loss changes in NNX objects goes from one micro-batch to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from dhelix.errors import DhelixError
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.pipeline.gradients import pipelined_sums
from dhelix.runtime.step.frameworks import gradients

REDUCTIONS = ("mean", "sum", "weighted")
Weights = Callable[..., jax.Array | float]


@dataclass
class Microbatching:
    """What `value_and_grad` does while a step is traced, and what it did.

    Attributes:
      microbatches: 1 leaves the batch whole.
      reduce: used by calls that do not name their own.
      pipeline: executes the micro-batches by a schedule over pipeline stages.
      calls: how often it was called.
      results: (value, gradients) of each call of the step itself, tracers; what a function returned that the step has
        JAX trace by itself (shard_map, jit, scan) is known only there.
    """

    microbatches: int
    reduce: str
    pipeline: Fold | None = None
    calls: int = 0
    results: list[Any] = field(default_factory=list)
    trace: Any = field(default_factory=get_opaque_trace_state)

    @property
    def splits(self) -> bool:
        return self.pipeline is not None or self.microbatches > 1

    def called(self, result: Any) -> None:
        self.calls += 1
        if get_opaque_trace_state() == self.trace:
            self.results.append(result)


_traced_for = jax.make_user_context()
"""JAX keeps what it traced: a function that calls `value_and_grad` is traced for each step, and once more outside of
any."""
_active: ContextVar[Microbatching | None] = ContextVar("dhelix_microbatching", default=None)


@contextlib.contextmanager
def microbatching(
    microbatches: int, reduce: str, pipeline: Fold | None = None, step: int = 0
) -> Iterator[Microbatching]:
    """While this is entered, `value_and_grad` splits its batch; `step` tells steps apart."""
    token = _active.set(Microbatching(microbatches, reduce, pipeline))
    try:
        active = _active.get()
        assert active is not None
        with _traced_for((microbatches, reduce, pipeline, step)):
            yield active
    finally:
        _active.reset(token)


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    rng_argnums: int | Sequence[int] = (),
    reduce: str | None = None,
    weights: Weights | None = None,
) -> Callable[..., Any]:
    """Drop-in for `jax.value_and_grad` that a `strand_interleave(microbatches=M)` step turns into a loop.

    Args:
      loss_fn: `loss_fn(*args, **kwargs) -> loss` or `-> (loss, aux)`; loss is a scalar.
      argnums: positional arguments to differentiate by, an int or several; `nnx.DiffState` where they are objects of
        Flax NNX (rule 5).
      has_aux: whether `loss_fn` returns auxiliary outputs too (rule 4).
      batch_argnums: positional arguments to split (rule 1); by default all but those of `argnums` and
        `rng_argnums`. Every micro-batch gets the others, and keyword arguments, as they are.
      rng_argnums: random keys; micro-batch m gets `jax.random.fold_in(key, m)`.
      reduce: "mean", "sum" or "weighted" (rule 3); by default what `strand_interleave` was given.
      weights: for "weighted": takes the arguments of `loss_fn` and returns the weight of the micro-batch.

    Returns:
      A function of the same arguments that returns `(loss, grads)` or `((loss, aux), grads)`.

    Raises:
      DhelixError: a batch that M does not divide, an argument without a batch axis, an auxiliary output whose
        shape depends on the batch in another way, "weighted" without weights or the reverse.
    """
    numbers = gradients.numbers_of(argnums)
    options = _Options(
        _as_tuple(numbers) or (),
        isinstance(numbers, int),
        has_aux,
        _as_tuple(batch_argnums),
        _as_tuple(rng_argnums) or (),
        reduce,
        weights,
    )
    if reduce is not None:
        check_reduction(reduce)
    of_arrays = _of_arrays(loss_fn, options)

    @functools.wraps(loss_fn)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        objects = gradients.of_objects(loss_fn, argnums, has_aux, args, kwargs)
        if objects is None:
            result = of_arrays(*args, **kwargs)
        else:
            of_pure = functools.partial(_of_arrays, options=dataclasses.replace(options, has_aux=True))
            result = objects.run(of_pure, active is not None and active.splits, args, kwargs)
        if active is not None:
            active.called(result)
        return result

    return value_and_grad_fn


def _of_arrays(loss_fn: Callable[..., Any], options: _Options, carried: Any = None) -> Callable[..., Any]:
    """The gradient function of arrays; with `carried`, of a loss of that keyword (`gradients.Differentiate`)."""
    argnums = options.argnums[0] if options.single else options.argnums
    plain = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=options.has_aux)

    def function(*args: Any, **kwargs: Any) -> Any:
        active = _active.get()
        if active is None or not active.splits:
            return plain(*args, **kwargs)
        if active.pipeline is not None:
            return _Pipelined(loss_fn, active.pipeline, plain, options, active, args, kwargs, carried).run()
        return _Loop(plain, options, active, args, kwargs, carried).run()

    return function


def check_reduction(reduce: str) -> None:
    """Raises DhelixError unless `reduce` is one of REDUCTIONS."""
    if reduce not in REDUCTIONS:
        raise DhelixError(f"reduce={reduce!r} means nothing; take one of {', '.join(REDUCTIONS)}")


@dataclass(frozen=True)
class _Options:
    argnums: tuple[int, ...]
    single: bool  # whether argnums was a number: the gradients are those of one argument
    has_aux: bool
    batch_argnums: tuple[int, ...] | None
    rng_argnums: tuple[int, ...]
    reduce: str | None
    weights: Weights | None


@dataclass(frozen=True)
class _Sum:
    """How one output of the micro-batches becomes one of the batch."""

    like: jax.ShapeDtypeStruct  # that of one micro-batch
    weighted: bool  # combines by `reduce`; otherwise it adds up
    stacked: bool = False  # has the batch as its leading axis

    @property
    def dtype(self) -> Any:
        if jnp.issubdtype(self.like.dtype, jnp.inexact):
            return jnp.promote_types(self.like.dtype, jnp.float32)
        return self.like.dtype


class _Loop:
    """One call of a gradient function over M micro-batches."""

    def __init__(
        self,
        plain: Callable[..., Any],
        options: _Options,
        active: Microbatching,
        args: Any,
        kwargs: Any,
        carried: Any = None,
    ):
        self.plain = plain
        self.options = options
        self.count = active.microbatches
        self.reduce = options.reduce or active.reduce
        self.args = args
        self.kwargs = kwargs
        self.carried = carried
        if self.reduce == "weighted" and options.weights is None:
            raise DhelixError(
                'reduce="weighted" needs value_and_grad(..., weights=): a function of the arguments of the'
                " loss that returns the weight of a micro-batch, such as its number of unmasked tokens"
            )
        if self.reduce != "weighted" and options.weights is not None:
            raise DhelixError(f'weights= weighs nothing with reduce="{self.reduce}": take reduce="weighted"')
        taken = {index % len(args) for index in (*options.argnums, *options.rng_argnums)}
        rest = tuple(index for index in range(len(args)) if index not in taken)
        self.batch_argnums = rest if options.batch_argnums is None else options.batch_argnums

    def run(self) -> Any:
        batches = {index: self.args[index] for index in self.batch_argnums}
        self._check(batches)
        batches = jax.tree.map(self._split, batches)
        numbers = jnp.arange(self.count, dtype=jnp.uint32)

        one = jax.eval_shape(lambda xs: self._microbatch(xs, self.carried)[:2], _first((batches, numbers)))
        sums = self._plan(one)
        flat_sums, treedef = jax.tree.flatten(sums, is_leaf=lambda x: isinstance(x, _Sum))

        def body(carry: Any, xs: Any) -> Any:
            totals, total_weight, carried = carry
            result, weight, carried = self._microbatch(xs, carried)
            values = treedef.flatten_up_to(result)
            totals = [
                total if how.stacked else _add(total, value, how, weight)
                for total, value, how in zip(totals, values, flat_sums, strict=True)
            ]
            stacked = [value if how.stacked else None for value, how in zip(values, flat_sums, strict=True)]
            return (totals, None if weight is None else total_weight + weight, carried), stacked

        zeros = [None if how.stacked else _zeros(how.like, how.dtype) for how in flat_sums]
        no_weight = None if one[1] is None else _zeros(one[1], one[1].dtype)
        (totals, weight, carried), stacked = jax.lax.scan(body, (zeros, no_weight, self.carried), (batches, numbers))
        outputs = [
            self._join(rows) if how.stacked else self._finish(total, weight, how)
            for total, rows, how in zip(totals, stacked, flat_sums, strict=True)
        ]
        result = treedef.unflatten(outputs)
        if self.carried is None:
            return result
        (value, aux), grads = result
        return (value, (carried, aux)), grads

    def _microbatch(self, xs: Any, carried: Any) -> tuple[Any, jax.Array | None, Any]:
        """Result of one micro-batch, its weight, and what the next one gets."""
        args = self._arguments(xs)
        result, carried = self._result(args, carried)
        return result, self._weight(args), carried

    def _result(self, args: Sequence[Any], carried: Any) -> tuple[Any, Any]:
        if carried is None:
            return self.plain(*args, **self.kwargs), None
        (value, (carried, aux)), grads = self.plain(*args, carried=carried, **self.kwargs)
        return ((value, aux), grads), carried

    def _arguments(self, xs: Any) -> list[Any]:
        """Those of one micro-batch."""
        batches, number = xs
        args = self._with(batches)
        for index in self.options.rng_argnums:
            args[index] = jax.random.fold_in(args[index], number)
        return args

    def _with(self, batches: Mapping[int, Any]) -> list[Any]:
        """All arguments; these in place of the batch's own. Others may be functions, flags or names."""
        return [batches.get(index, arg) for index, arg in enumerate(self.args)]

    def _weight(self, args: Sequence[Any]) -> jax.Array | None:
        if self.reduce != "weighted":
            return None
        assert self.options.weights is not None
        weight = jnp.asarray(self.options.weights(*args, **self.kwargs), jnp.float32)
        if weight.shape:
            raise DhelixError(f"weights= must return one number for a micro-batch, not shape {weight.shape}")
        return weight

    def _plan(self, one: Any) -> Any:
        """A _Sum for each output."""

        def floating(like: jax.ShapeDtypeStruct) -> _Sum:
            return _Sum(like, weighted=True)

        result, _ = one
        if not self.options.has_aux:
            return jax.tree.map(floating, result)
        (value, aux), grads = result
        batches = {index: self.args[index] for index in self.batch_argnums}
        (_, whole), _ = jax.eval_shape(lambda some: self._result(self._with(some), self.carried)[0], batches)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(aux)
        sums = [
            self._plan_aux(path, like, of_batch)
            for (path, like), of_batch in zip(leaves, jax.tree.leaves(whole), strict=True)
        ]
        return (floating(value), treedef.unflatten(sums)), jax.tree.map(floating, grads)

    def _plan_aux(self, path: Any, one: jax.ShapeDtypeStruct, whole: jax.ShapeDtypeStruct) -> _Sum:
        if one.shape == whole.shape:
            if jnp.issubdtype(one.dtype, jnp.number):
                return _Sum(one, weighted=jnp.issubdtype(one.dtype, jnp.inexact))
        elif one.shape and (one.shape[0] * self.count, *one.shape[1:]) == whole.shape:
            return _Sum(one, weighted=False, stacked=True)
        other = f" for a micro-batch and {list(whole.shape)} for the batch" if one.shape != whole.shape else ""
        raise DhelixError(
            f"aux{jax.tree_util.keystr(path)} is {one.dtype}{list(one.shape)}{other}, and there is no one way to"
            f" combine {self.count} of them: return numbers (a flag as an integer), or arrays with the batch as leading"
            " axis, or compute it outside value_and_grad"
        )

    def _check(self, batches: dict[int, Any]) -> None:
        """Every leaf of the batch has one and the same leading axis, which M divides."""
        rows, first = None, ""
        for index, batch in batches.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
                name = f"argument {index}{jax.tree_util.keystr(path)}"
                shape = jnp.shape(leaf) if not hasattr(leaf, "shape") else leaf.shape
                if not shape:
                    raise DhelixError(
                        f"{name} has no batch axis to split: name the batch with value_and_grad(...,"
                        " batch_argnums=), random keys with rng_argnums="
                    )
                if shape[0] % self.count:
                    raise DhelixError(
                        f"{name} has {shape[0]} rows, which {self.count} micro-batches do not divide: make"
                        f" the batch a multiple of {self.count}, or change microbatches="
                    )
                rows, first = (rows, first) if rows is not None else (shape[0], name)
                if shape[0] != rows:
                    raise DhelixError(
                        f"{first} has {rows} rows and {name} {shape[0]}: name the batch with"
                        " value_and_grad(..., batch_argnums=)"
                    )
        if rows is None:
            raise DhelixError(
                "value_and_grad got no batch to split: pass it by position, and name it with batch_argnums="
            )

    def _split(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [M, B/M, ...], rows m, m + M, ... in micro-batch m."""
        x = jnp.asarray(x)
        return x.reshape(x.shape[0] // self.count, self.count, *x.shape[1:]).swapaxes(0, 1)

    def _join(self, x: jax.Array) -> jax.Array:
        """[M, B/M, ...] -> [B, ...], the inverse of _split."""
        return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def _finish(self, total: Any, weight: jax.Array | None, how: _Sum) -> jax.Array:
        if how.weighted and weight is not None:
            total = total / jnp.where(weight == 0, 1, weight)  # where nothing counts, all is zero
        elif how.weighted and self.reduce == "mean":
            total = total / self.count
        return total.astype(how.like.dtype)


class _Pipelined(_Loop):
    """One call of a gradient function whose micro-batches go through a pipeline."""

    def __init__(self, loss_fn: Callable[..., Any], fold: Fold, *rest: Any):
        super().__init__(*rest)
        self.loss_fn = loss_fn
        self.fold = fold
        if self.carried is not None:
            raise DhelixError("pipeline=: split objects of Flax NNX, and differentiate by their state (nnx.split)")

    def run(self) -> Any:
        batches = {index: self.args[index] for index in self.batch_argnums}
        self._check(batches)
        argnums = self.options.argnums
        params, params_tree = jax.tree.flatten([self.args[i] for i in argnums])
        numbers = jnp.arange(self.count, dtype=jnp.uint32)
        batch, batch_tree = jax.tree.flatten((jax.tree.map(self._split, batches), numbers))
        structure: list[Any] = []
        for leaf in params:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise DhelixError(
                    f"pipeline=: a parameter is {leaf.dtype}{list(leaf.shape)} and has no gradient: pass it beside the"
                    " parameters that argnums= names"
                )

        def function(*flat: Any) -> list[Any]:
            args = self._arguments(batch_tree.unflatten(flat[len(params) :]))
            for index, value in zip(argnums, params_tree.unflatten(flat[: len(params)]), strict=True):
                args[index] = value
            result = self.loss_fn(*args, **self.kwargs)
            outputs, tree = jax.tree.flatten(result)
            structure[:] = [tree, [output.dtype for output in outputs]]
            _check_numbers(outputs)
            return outputs

        def seed(flat: Sequence[Any]) -> jax.Array:
            weight = self._weight(self._arguments(batch_tree.unflatten(flat)))
            return jnp.float32(1) if weight is None else weight

        outputs, gradients = pipelined_sums(function, self.fold, params, batch, seed)
        weight = jnp.sum(jax.lax.map(seed, batch)) if self.reduce == "weighted" else None
        sums = [_Sum(jax.ShapeDtypeStruct((), dtype), jnp.issubdtype(dtype, jnp.inexact)) for dtype in structure[1]]
        result = structure[0].unflatten([self._finish(x, weight, how) for x, how in zip(outputs, sums, strict=True)])
        like = [_Sum(jax.ShapeDtypeStruct(x.shape, x.dtype), weighted=True) for x in params]
        gradients = [self._finish(x, weight, how) for x, how in zip(gradients, like, strict=True)]
        by_argument = params_tree.unflatten(gradients)
        return result, by_argument[0] if self.options.single else tuple(by_argument)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _check_numbers(outputs: Sequence[Any]) -> None:
    for output in outputs:
        if output.shape or not jnp.issubdtype(output.dtype, jnp.number):
            raise DhelixError(
                f"pipeline=: the loss function returns {output.dtype}{list(output.shape)}; under a pipeline its loss"
                " and auxiliary outputs are numbers: reduce them there"
            )


def _add(total: jax.Array, value: jax.Array, how: _Sum, weight: jax.Array | None) -> jax.Array:
    value = jnp.asarray(value, how.dtype)  # an auxiliary output may be a number of Python's
    if how.weighted and weight is not None:
        # Not a bare product: a micro-batch without tokens may have a loss of 0/0.
        value = jnp.where(weight == 0, jnp.zeros_like(value), value * weight)
    return total + value


def _zeros(like: jax.ShapeDtypeStruct, dtype: Any) -> jax.Array:
    """Zeros of the sharding or varying manual axes that `like` has in its type, as a scan's state must."""
    sharding = like.sharding if _is_explicit(like.sharding) else None
    zeros = jnp.zeros(like.shape, dtype, out_sharding=sharding)
    varying = like.manual_axis_type.varying if like.manual_axis_type is not None else ()
    return jax.lax.pcast(zeros, tuple(sorted(varying)), to="varying") if varying else zeros


def _is_explicit(sharding: Any) -> bool:
    types = sharding.mesh.axis_types if isinstance(sharding, jax.sharding.NamedSharding) else ()
    return jax.sharding.AxisType.Explicit in types


def _as_tuple(argnums: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if argnums is None:
        return None
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
