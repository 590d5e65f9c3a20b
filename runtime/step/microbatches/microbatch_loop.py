"""Runs a gradient function over M micro-batches, one after the other or through a pipeline.

    for m in range(M):  loss, grads += jax.value_and_grad(loss_fn)(params, batch[m::M])      (lax.scan)

`batch_split.py` defines which arguments are split. `combining.py` defines how outputs combine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dhelix.errors import DhelixError
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.pipeline.gradients import pipelined_sums
from dhelix.runtime.step.microbatches.batch_split import Arguments, Naming
from dhelix.runtime.step.microbatches.combining import (
    OVERWRITTEN,
    Combination,
    How,
    collections,
    of_auxiliary,
    of_gradients,
)

Weights = Callable[..., jax.Array | float]


@dataclass(frozen=True)
class Options:
    """The options of one gradient function.

    Attributes:
      loss: the loss function, a function of arrays.
      plain: `jax.value_and_grad` of `loss`.
      naming: the roles of the arguments (differentiated, batch, random keys).
      single: whether argnums was one number. Then the gradients are those of one argument, without a tuple.
      has_aux, holomorphic: as in `jax.value_and_grad`.
      reduce: how losses and gradients combine; None: as the step's option `reduce` says.
      weights: for "weighted": function of the loss function's arguments that returns the weight of a micro-batch.
    """

    loss: Callable[..., Any]
    plain: Callable[..., Any]
    naming: Naming
    single: bool
    has_aux: bool
    holomorphic: bool
    reduce: str | None
    weights: Weights | None


class Loop:
    """One call of a gradient function over M micro-batches."""

    def __init__(self, options: Options, microbatches: int, reduce: str, args: Any, kwargs: Any, carried: Any = None):
        """
        Args:
          options: options of the gradient function.
          microbatches: the number M of micro-batches.
          reduce: the step's option `reduce`, which is used if `options.reduce` is None.
          args, kwargs: arguments of the call, with the whole batch.
          carried: the loop-carried value for the first micro-batch. The loss gets the value as keyword `carried`
            (`gradients.Differentiate`). None: nothing is carried.
        """
        self.options = options
        self.carried = carried
        self.count = microbatches
        self.reduce = options.reduce or reduce
        if self.reduce == "weighted" and options.weights is None:
            raise DhelixError(
                'reduce="weighted" needs value_and_grad(..., weights=): a function of the arguments of the'
                " loss that returns the weight of a micro-batch, such as its number of unmasked tokens"
            )
        if self.reduce != "weighted" and options.weights is not None:
            raise DhelixError(f'weights= has no effect with reduce="{self.reduce}": use reduce="weighted"')
        self.arguments = Arguments.of(options.naming, args, kwargs, microbatches)

    def run(self) -> Any:
        xs = self.arguments.split_batch(), jnp.arange(self.count, dtype=jnp.uint32)
        first = jax.make_jaxpr(lambda xs: self._microbatch(_first(xs), self.carried)[:2], return_shape=True)
        jaxpr, (result, _) = first(xs)
        treedef = jax.tree.structure(result)
        likes, of_weight = jaxpr.out_avals[: treedef.num_leaves], jaxpr.out_avals[treedef.num_leaves :]
        plan = self._plan(likes, result)

        def body(carry: Any, xs: Any) -> Any:
            totals, total_weight, carried = carry
            result, weight, carried = self._microbatch(xs, carried)
            values = treedef.flatten_up_to(result)
            totals = [
                how.add(total, value, weight) if how.summed else None
                for total, value, how in zip(totals, values, plan, strict=True)
            ]
            rows = [value if how.how is How.JOIN else None for value, how in zip(values, plan, strict=True)]
            return (totals, None if weight is None else total_weight + weight, carried), rows

        start = [how.start() if how.summed else None for how in plan]
        no_weight = Combination(of_weight[0], How.ADD).start() if of_weight else None
        (totals, weight, carried), rows = jax.lax.scan(body, (start, no_weight, self.carried), xs)
        outputs = [self._finish(*parts, weight) for parts in zip(totals, rows, plan, strict=True)]
        result = treedef.unflatten(outputs)
        if self.carried is None:
            return result
        (value, aux), grads = result
        return (value, (carried, aux)), grads

    def _finish(self, total: Any, rows: Any, how: Combination, weight: jax.Array | None) -> Any:
        if how.how is How.NONE:
            return how.nothing()
        if how.how is How.JOIN:
            return how.typed(self.arguments.join(rows))
        return how.finish(total, weight, self.count, self.reduce)

    def _microbatch(self, xs: Any, carried: Any) -> tuple[Any, jax.Array | None, Any]:
        """Returns the result of one micro-batch, its weight, and the value of `carried` for the next micro-batch."""
        args, kwargs = self.arguments.with_batch(*xs)
        result, carried = self._result(args, kwargs, carried)
        return result, self._weight(args, kwargs), carried

    def _result(self, args: Any, kwargs: Any, carried: Any) -> tuple[Any, Any]:
        if carried is None:
            return self.options.plain(*args, **kwargs), None
        (value, (carried, aux)), grads = self.options.plain(*args, carried=carried, **kwargs)
        return ((value, aux), grads), carried

    def _weight(self, args: Any, kwargs: Any) -> jax.Array | None:
        if self.reduce != "weighted":
            return None
        assert self.options.weights is not None
        weight = jnp.asarray(self.options.weights(*args, **kwargs), jnp.float32)
        if weight.shape:
            raise DhelixError(f"weights= must return one number per micro-batch, not shape {weight.shape}")
        return weight

    def _plan(self, likes: Sequence[Any], result: Any) -> list[Combination]:
        """Returns how each leaf of `result` combines. The leaves are loss, auxiliary outputs and gradients, in order.

        `likes` holds the abstract values of the leaves.
        """
        value, grads = result
        aux = value[1] if self.options.has_aux else ()
        count = len(jax.tree.leaves(aux))
        loss = [Combination(likes[0], How.REDUCE)]
        auxiliary = of_auxiliary(likes[1 : 1 + count], self._of_whole_batch(), aux, self.count) if count else []
        return loss + auxiliary + of_gradients(likes[1 + count :], grads)

    def _of_whole_batch(self) -> Sequence[Any]:
        """Abstract values of the auxiliary outputs for the whole batch."""

        def whole(batch: Any) -> Any:
            args, kwargs = self.arguments.with_batch(batch)
            ((_, aux), _), _ = self._result(args, kwargs, self.carried)
            return aux

        return jax.tree.leaves(jax.eval_shape(whole, self.arguments.batch))


class PipelinedLoop(Loop):
    """One call of a gradient function whose micro-batches pass through a pipeline."""

    def __init__(self, fold: Fold, options: Options, *rest: Any):
        super().__init__(options, *rest)
        self.fold = fold
        if options.holomorphic:
            raise DhelixError(
                "pipeline=: holomorphic=True is not supported, because losses and parameters are real; leave it out"
            )
        if self.carried is not None:
            raise DhelixError(
                "pipeline=: split Flax NNX objects with nnx.split, and differentiate with respect to their state"
            )

    def run(self) -> Any:
        args = self.arguments.args
        argnums = [index % len(args) for index in self.options.naming.argnums]
        parameters = [args[i] for i in argnums]
        params, params_tree = jax.tree.flatten(parameters)
        _check_parameters(parameters)
        numbers = jnp.arange(self.count, dtype=jnp.uint32)
        batch, batch_tree = jax.tree.flatten((self.arguments.split_batch(), numbers))
        structure: list[Any] = []

        def function(*flat: Any) -> list[Any]:
            args, kwargs = self.arguments.with_batch(*batch_tree.unflatten(flat[len(params) :]))
            for index, value in zip(argnums, params_tree.unflatten(flat[: len(params)]), strict=True):
                args[index] = value
            outputs, tree = jax.tree.flatten(self.options.loss(*args, **kwargs))
            structure[:] = [tree, [jax.typeof(output) for output in outputs]]
            _check_numbers(structure[1])
            return outputs

        def seed(flat: Sequence[Any]) -> jax.Array:
            weight = self._weight(*self.arguments.with_batch(*batch_tree.unflatten(flat)))
            return jnp.float32(1) if weight is None else weight

        outputs, gradients = pipelined_sums(function, self.fold, params, batch, seed)
        weight = jnp.sum(jax.lax.map(seed, batch)) if self.reduce == "weighted" else None

        def finish(total: jax.Array, like: Any) -> jax.Array:
            inexact = jnp.issubdtype(like.dtype, jnp.inexact)
            return Combination(like, How.REDUCE if inexact else How.ADD).finish(total, weight, self.count, self.reduce)

        result = structure[0].unflatten(map(finish, outputs, structure[1]))
        by_argument = params_tree.unflatten(map(finish, gradients, map(jax.typeof, params)))
        return result, by_argument[0] if self.options.single else tuple(by_argument)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _check_parameters(parameters: Sequence[Any]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    for (path, leaf), collection in zip(leaves, collections(parameters), strict=True):
        like = jax.typeof(leaf)
        if collection == OVERWRITTEN:
            name = jax.tree_util.keystr(path[1:])
            raise DhelixError(f"pipeline=: the gradient of {name} overwrites it, but a pipeline only adds up gradients")
        if not jnp.issubdtype(like.dtype, jnp.floating):
            raise DhelixError(
                f"pipeline=: a parameter is {like.dtype}{list(like.shape)} and has no real gradient: pass it as an "
                "argument that argnums= does not name"
            )


def _check_numbers(outputs: Sequence[Any]) -> None:
    for output in outputs:
        if output.shape or not jnp.issubdtype(output.dtype, jnp.number):
            raise DhelixError(
                f"pipeline=: the loss function returns {output.dtype}{list(output.shape)}; under a pipeline its loss "
                "and auxiliary outputs must be numbers: reduce them in the loss function"
            )
