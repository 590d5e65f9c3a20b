"""Differentiates, in a loop over micro-batches, a loss that takes objects of Flax NNX and may change them.

What happens to the objects:
1. If the loss gives a variable a new value of the same shape and type (running statistics, counts of random streams),
   the variable is loop-carried. Its value passes from one micro-batch to the next, as if the loss were called once for
   each micro-batch.
2. A new variable, or a variable whose shape changes (sown intermediates), becomes an auxiliary output. It combines over
   micro-batches like other auxiliary outputs.
3. A differentiated variable has the same value for all micro-batches. After the loop, it has the value that the last
   micro-batch gave it. (`nnx.remat` and `nnx.scan` give all variables new, equal values.)
4. All micro-batches change the graph and static attributes in the same way. After the loop, the objects have the graph
   and attributes of one micro-batch.

NNX tracks the identity of objects in an `nnx.update_context`. This module splits the objects outside of the traced
loss. Inside of the loss, it merges them, and splits them again at the end. Then it merges them outside again. Variables
are numbered in the order in which NNX walks the graph of all arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dhelix.runtime.step.frameworks import nnx_front

_TAG = "dhelix.value_and_grad"


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Kept:
    """Takes the place of a variable's value in the loss's results, if the variable did not change or is loop-carried.

    Attributes:
      number: the number of the variable.
    """

    number: int


class _Object(NamedTuple):
    """An object after the loss: the object's graph, and a new value or a `_Kept` for each of its variables."""

    graph: Any
    values: list[Any]


class _Argument:
    """An argument of the loss, split into graphs and arrays.

    Attributes:
      differentiable: the value that `_Loss`, a function of arrays, gets for this argument. In this value, each object
        is replaced by its differentiated state. None for an argument that holds objects and is not differentiated.
    """

    def __init__(self, context: Any, value: Any, wrt: Any):
        """
        Args:
          context: an `nnx.SplitContext`.
          value: the argument.
          wrt: filter of the variables to differentiate by; None if the argument is not differentiated.
        """
        leaves, self._treedef = jax.tree.flatten(value, is_leaf=nnx_front.is_object)
        self._graphs = [None] * len(leaves)
        self._rest: list[tuple[Any, ...]] = [()] * len(leaves)
        objects = [i for i, leaf in enumerate(leaves) if nnx_front.is_object(leaf)]
        for index in objects:
            whole = wrt is None or isinstance(leaves[index], nnx_front.loaded().Variable)
            self._graphs[index], leaves[index], *rest = context.split(leaves[index], *(() if whole else (wrt, ...)))
            self._rest[index] = tuple(rest)
        self._closed = leaves if objects and wrt is None else None
        self.differentiable = self._treedef.unflatten(leaves) if self._closed is None else None

    def merged(self, context: Any, differentiable: Any) -> Any:
        """Rebuilds the argument with new objects. `context` is an `nnx.MergeContext`."""
        leaves = self._treedef.flatten_up_to(differentiable) if self._closed is None else self._closed
        merged = [
            leaf if graph is None else context.merge(graph, leaf, *rest)
            for graph, leaf, rest in zip(self._graphs, leaves, self._rest, strict=True)
        ]
        return self._treedef.unflatten(merged)


class NnxGradients:
    """Differentiates a loss as `nnx.value_and_grad` does, in a loop over micro-batches if there are any."""

    def __init__(self, loss_fn: Callable[..., Any], argnums: Any, has_aux: bool):
        self._loss_fn = loss_fn
        self._argnums = argnums
        self._has_aux = has_aux

    def run(self, differentiate: Any, splits: bool, args: Any, kwargs: Any) -> Any:
        """Returns the value and the gradients of the loss.

        Args:
          differentiate: differentiates a function of arrays in the loop (`gradients.Differentiate`).
          splits: whether there are micro-batches.
          args, kwargs: arguments of the loss.
        """
        nnx = nnx_front.loaded()
        if not splits:
            whole = nnx.value_and_grad(self._loss_fn, argnums=self._argnums, has_aux=self._has_aux)
            return whole(*args, **kwargs)
        wrt = self._wrt(len(args))
        with nnx.update_context(_TAG):
            variables = _variables((args, kwargs))
            values = [variable.get_raw_value() for variable in variables]
            for variable, value in zip(variables, values, strict=True):
                variable.set_raw_value(value)  # makes NNX refuse captured objects before the merge empties them
            with nnx.split_context(_TAG) as context:
                arguments = [_Argument(context, arg, wrt.get(i)) for i, arg in enumerate(args)]
                objects = {name for name, arg in kwargs.items() if nnx_front.has_objects(arg)}
                named = {name: _Argument(context, kwargs[name], None) for name in sorted(objects)}
            pure = [argument.differentiable for argument in arguments]
            arrays = {name: arg for name, arg in kwargs.items() if name not in objects}
            given = self._differentiated(args, wrt)
            fixed = frozenset(n for n, variable in enumerate(variables) if id(variable) in given)
            loss = _Loss(self._loss_fn, self._has_aux, arguments, named, fixed)
            carried = {number: values[number] for number in loss.changes(pure, arrays)}
            (value, (carried, outputs)), gradients = differentiate(loss, carried=carried)(*pure, **arrays)
            kept = [carried.get(number, value) for number, value in enumerate(values)]
            with nnx.merge_context(_TAG, inner=False) as context:
                *_, aux = jax.tree.map(lambda x: _restored(context, x, kept), outputs, is_leaf=_is_split)
        return (value, aux) if self._has_aux else value, gradients

    def _wrt(self, count: int) -> dict[int, Any]:
        """Maps the position of each differentiated argument to the filter of its differentiated variables."""
        nnx = nnx_front.loaded()
        argnums = self._argnums if isinstance(self._argnums, Sequence) else (self._argnums,)
        given = [x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, nnx.Param) for x in argnums]
        return {x.argnum % count: x.filter for x in given}

    def _differentiated(self, args: Any, wrt: dict[int, Any]) -> set[int]:
        """The `id`s of all differentiated variables."""
        nnx = nnx_front.loaded()
        found = set()
        for position, which in wrt.items():
            chosen = nnx.filterlib.to_predicate(which)
            for leaf in filter(nnx_front.is_object, jax.tree.leaves(args[position], is_leaf=nnx_front.is_object)):
                whole = isinstance(leaf, nnx.Variable)
                each = nnx.iter_graph(leaf, graph=True)
                found |= {id(x) for path, x in each if isinstance(x, nnx.Variable) and (whole or chosen(path, x))}
        return found


class _Loss:
    """The loss as a function of arrays.

    It returns the loss and the pair (carried, outputs). `outputs` holds all arguments after the loss, with their
    objects, and the auxiliary output of the user's loss.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool,
        arguments: list[_Argument],
        named: dict[str, _Argument],
        differentiated: frozenset[int],
    ):
        """
        Args:
          loss_fn: the user's loss.
          has_aux: whether the user's loss returns auxiliary outputs.
          arguments: all positional arguments.
          named: the keyword arguments that hold objects.
          differentiated: numbers of the variables by which the loss is differentiated.
        """
        self._differentiated = differentiated
        self.__name__ = getattr(loss_fn, "__name__", "loss")
        self._loss_fn = loss_fn
        self._has_aux = has_aux
        self._arguments = arguments
        self._named = named
        self._changed: list[int] = []

    def changes(self, differentiable: list[Any], arrays: dict[str, Any]) -> list[int]:
        """The numbers of the variables to which the loss gives a new value of the same shape and type.

        Rules 1 and 3 of the module apply to these variables.
        """
        jax.eval_shape(lambda: self(*differentiable, **arrays)[0])
        return self._changed

    def __call__(self, *differentiable: Any, carried: dict[int, Any] | None = None, **arrays: Any) -> Any:
        nnx = nnx_front.loaded()
        carried = carried or {}
        with nnx.merge_context(_TAG, inner=True) as context:
            args = [one.merged(context, x) for one, x in zip(self._arguments, differentiable, strict=True)]
            objects = {name: one.merged(context, one.differentiable) for name, one in self._named.items()}
        kwargs = {**arrays, **objects}
        variables = _variables((args, kwargs))
        for number, value in carried.items():
            if number not in self._differentiated:  # rule 3
                variables[number].set_raw_value(value)
        before = [variable.get_raw_value() for variable in variables]

        result = self._loss_fn(*args, **kwargs)
        loss, aux = result if self._has_aux else (result, None)

        after = [variable.get_raw_value() for variable in variables]
        same = [_is_same(old, new) for old, new in zip(before, after, strict=True)]
        self._changed = [n for n, is_same in enumerate(same) if not is_same and _is_alike(before[n], after[n])]
        kept = {id(v): _Kept(n) for n, v in enumerate(variables) if same[n] or n in carried}
        args, kwargs = jax.tree.map(
            lambda x: x if nnx_front.is_object(x) else None, (args, kwargs), is_leaf=nnx_front.is_object
        )
        with nnx.split_context(_TAG) as context:
            outputs = jax.tree.map(lambda x: _split(context, x, kept), (args, kwargs, aux), is_leaf=nnx_front.is_object)
        return loss, ({number: after[number] for number in carried}, outputs)


def _variables(tree: Any) -> list[Any]:
    """All variables of the objects in a tree, without duplicates. Their order depends only on the graph."""
    nnx = nnx_front.loaded()
    return [x for _, x in nnx.iter_graph(tree, graph=True) if isinstance(x, nnx.Variable)]


def _split(context: Any, x: Any, kept: dict[int, _Kept]) -> Any:
    if not nnx_front.is_object(x):
        return x
    graph, state = context.flatten(x)
    is_variable = [isinstance(leaf, nnx_front.loaded().Variable) for leaf in state.leaves]
    values = [
        kept.get(id(leaf)) or (leaf.get_raw_value() if variable else leaf)
        for leaf, variable in zip(state.leaves, is_variable, strict=True)
    ]
    return _Object(graph, values)


def _is_split(x: Any) -> bool:
    return isinstance(x, _Object)


def _restored(context: Any, x: Any, kept: list[Any]) -> Any:
    if not _is_split(x):
        return x
    values = [kept[value.number] if isinstance(value, _Kept) else value for value in x.values]
    return context.unflatten(x.graph, values)


def _is_same(old: Any, new: Any) -> bool:
    leaves = jax.tree.leaves(old), jax.tree.leaves(new)
    return jax.tree.structure(old) == jax.tree.structure(new) and all(a is b for a, b in zip(*leaves, strict=True))


def _is_alike(old: Any, new: Any) -> bool:
    """Whether a loop can carry the variable: both values have the same structure, shapes and types."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        return False
    leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(jnp.shape(a) == jnp.shape(b) and jax.typeof(a).dtype == jax.typeof(b).dtype for a, b in leaves)
