"""Finds the arguments of a loss function that are the batch, and makes the arguments of each micro-batch.

    value_and_grad(loss)(params, batch)                                   the batch is the only other argument
    value_and_grad(loss, batch_argnums=(1, 2))(params, x, y)              named by position
    value_and_grad(loss, batch_argnames="x")(adapters, frozen, x=x)       named by the parameter of the loss

Rules
1. If the user names arguments as the batch, exactly these arguments are the batch.
2. Otherwise, the batch is the only argument that holds an array with an axis. Arguments in `argnums` and named random
   keys do not count. If several arguments hold such arrays, the user must name the batch. Shapes do not tell which of
   them is the batch, because frozen weights may have as many layers as the batch has rows. Values that a loss function
   captures are never split.
3. Axis 0 of every leaf of the batch holds the leaf's rows. M, the number of micro-batches, must divide the row count.
   Micro-batch m takes the rows m, m + M, m + 2M, ... A batch that is sharded over a mesh axis stays sharded over this
   axis in every micro-batch, and no row moves between devices. (With consecutive rows, each micro-batch would lie on a
   few devices only.)
4. The number of the micro-batch is folded into named random keys.
5. Every micro-batch gets all other arguments unchanged.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dhelix.errors import DhelixError

Key = int | str  # identifies an argument of a call: its position, or its keyword
Indices = int | Sequence[int]
Names = str | Sequence[str]


@dataclass(frozen=True)
class Naming:
    """The roles that the user gives the arguments of a loss function.

    Attributes:
      function: the loss function.
      argnums: positions of the arguments to differentiate by. Negative positions count from the last argument.
      batch_argnums, batch_argnames: positions and parameter names of the batch; None if not given.
      rng_argnums, rng_argnames: positions and parameter names of random keys.
    """

    function: Callable[..., Any]
    argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...] | None
    batch_argnames: tuple[str, ...] | None
    rng_argnums: tuple[int, ...]
    rng_argnames: tuple[str, ...]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        argnums: Indices,
        batch_argnums: Indices | None,
        batch_argnames: Names | None,
        rng_argnums: Indices,
        rng_argnames: Names,
    ) -> Naming:
        """Converts the user's options to tuples. Raises DhelixError for a name that no parameter of `function` has."""
        naming = cls(
            function,
            indices(argnums),
            None if batch_argnums is None else indices(batch_argnums),
            None if batch_argnames is None else _names(batch_argnames),
            indices(rng_argnums),
            _names(rng_argnames),
        )
        for option, names in (("batch_argnames", naming.batch_argnames or ()), ("rng_argnames", naming.rng_argnames)):
            for name in names:
                naming._check_name(option, name)
        return naming

    def _check_name(self, option: str, name: str) -> None:
        parameters = _parameters(self.function)
        if parameters is None:
            raise DhelixError(
                f"{option}={name!r}: the names of the loss function's parameters are unknown; give positions"
            )
        if name not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise DhelixError(
                f"{option}={name!r}: the loss function has no parameter of that name; it has {', '.join(parameters)}"
            )

    def keys(self, option: str, nums: Sequence[int], names: Sequence[str], args: Any, kwargs: Any) -> tuple[Key, ...]:
        """Returns the keys of those arguments of a call that the user gave as positions `nums` or names `names`."""
        found: list[Key] = []
        for index in nums:
            if not -len(args) <= index < len(args):
                raise DhelixError(
                    f"{option}argnums={index}: the loss function was called with {len(args)} positional arguments; "
                    f"name keyword arguments with {option}argnames="
                )
            found.append(index % len(args))
        for name in names:
            found += [name] if name in kwargs else self._positions(f"{option}argnames", name, args, kwargs)
        return tuple(dict.fromkeys(found))

    def _positions(self, option: str, name: str, args: Any, kwargs: Any) -> list[int]:
        """The positions of the arguments that a call passed for the parameter `name`."""
        places = _places(self.function, args, kwargs)
        found = [index for index, place in enumerate(places) if place == name]
        if not found:
            passed = ", ".join(str(place) for place in (*places, *kwargs))
            raise DhelixError(f"{option}={name!r}: the call passes no such argument; it passes {passed or 'none'}")
        return found


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call. `batch_keys` and `rng_keys` tell which are the batch and which are random keys."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_keys: tuple[Key, ...]
    rng_keys: tuple[Key, ...]
    microbatches: int

    @classmethod
    def of(cls, naming: Naming, args: Any, kwargs: Any, microbatches: int) -> Arguments:
        """Finds the batch and the random keys in a call.

        Raises DhelixError if it is unclear what the batch is, or the number of micro-batches does not divide its rows.
        """
        rngs = naming.keys("rng_", naming.rng_argnums, naming.rng_argnames, args, kwargs)
        differentiated = tuple(index % len(args) for index in naming.argnums)
        if naming.batch_argnums is None and naming.batch_argnames is None:  # rule 2
            batch: tuple[Key, ...] = (_the_batch(naming, args, kwargs, {*differentiated, *rngs}),)
        else:
            nums, names = naming.batch_argnums or (), naming.batch_argnames or ()  # rule 1
            batch = naming.keys("batch_", nums, names, args, kwargs)
        _check_once({"is differentiated": differentiated, "is the batch": batch, "holds random keys": rngs})
        arguments = cls(tuple(args), kwargs, batch, rngs, microbatches)
        arguments._check_rows()
        return arguments

    @property
    def batch(self) -> list[Any]:
        return [self._get(key) for key in self.batch_keys]

    def split_batch(self) -> list[Any]:
        """Returns the batch split into micro-batches by rule 3: leaves [B, ...] become [M, B/M, ...]."""
        return jax.tree.map(self._split, self.batch)

    def with_batch(self, batch: Sequence[Any], number: jax.Array | None = None) -> tuple[list[Any], dict[str, Any]]:
        """Returns all arguments of the call, with `batch` in place of the call's batch.

        If `number` is given, the random keys are those of the micro-batch with this number (rule 4).
        """
        # Every trace gets new containers, because Equinox's State may be used only once.
        args, kwargs = jax.tree.map(lambda x: x, (list(self.args), dict(self.kwargs)))

        def put(key: Key, value: Any) -> None:
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value

        for key, value in zip(self.batch_keys, batch, strict=True):
            put(key, value)
        if number is not None:
            for key in self.rng_keys:
                put(key, jax.tree.map(functools.partial(_fold_in, number), self._get(key)))
        return args, kwargs

    def join(self, x: jax.Array) -> jax.Array:
        """Joins the rows of all micro-batches, [M, B/M, ...] -> [B, ...]. This is the inverse of the split."""
        return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def _split(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x.reshape(x.shape[0] // self.microbatches, self.microbatches, *x.shape[1:]).swapaxes(0, 1)

    def _get(self, key: Key) -> Any:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def _check_rows(self) -> None:
        """Raises DhelixError unless all leaves of the batch have the same number of rows and M divides it."""
        rows, first = None, ""
        for key, batch in zip(self.batch_keys, self.batch, strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
                name = f"{_title(key)}{jax.tree_util.keystr(path)}"
                shape = getattr(leaf, "shape", ())
                if not shape:
                    raise DhelixError(
                        f"{name} is {_kind(leaf)} and has no batch axis to split: pass it as an argument of its own, "
                        "and name the batch with batch_argnums= or batch_argnames=; name random keys with "
                        "rng_argnums="
                    )
                if not shape[0]:
                    raise DhelixError(f"{name} has no rows to split into {self.microbatches} micro-batches")
                if shape[0] % self.microbatches:
                    raise DhelixError(
                        f"{name} has {shape[0]} rows, which do not divide into {self.microbatches} micro-batches: make "
                        f"the batch a multiple of {self.microbatches}, or change microbatches="
                    )
                rows, first = (rows, first) if rows is not None else (shape[0], name)
                if shape[0] != rows:
                    raise DhelixError(
                        f"{first} has {rows} rows, but {name} has {shape[0]}: pass what is not part of the batch as an "
                        "argument of its own, and name the batch with batch_argnums= or batch_argnames="
                    )
        if rows is None:
            raise DhelixError(_NO_BATCH)


_NO_BATCH = (
    "value_and_grad found no batch to split: pass it to the loss function as an argument that is not differentiated, "
    "and if there are several, name it with batch_argnums= or batch_argnames="
)


def indices(given: Indices) -> tuple[int, ...]:
    """Returns one or several indices as a tuple. `given` has one of the forms that JAX accepts."""
    return (operator.index(given),) if is_index(given) else tuple(map(operator.index, given))  # type: ignore[arg-type]


def is_index(given: Indices) -> bool:
    return hasattr(given, "__index__")


def _names(given: Names) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _the_batch(naming: Naming, args: Any, kwargs: Any, taken: set[Key]) -> Key:
    """The key of the batch by rule 2: the only argument that holds arrays with an axis and is not in `taken`."""
    given: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
    given = {key: value for key, value in given.items() if key not in taken}
    places = _places(naming.function, args, kwargs)
    keys = [key for key, value in given.items() if any(map(_is_key, jax.tree.leaves(value)))]
    if keys and not all(_is_key(leaf) or _dtype(leaf) == jnp.uint32 for leaf in jax.tree.leaves(given[keys[0]])):
        raise DhelixError(
            f"{_title(keys[0], places)} holds random keys and other arrays: pass the keys as an argument of their own, "
            "and name it with rng_argnums= or rng_argnames=, so that every micro-batch draws its own numbers"
        )
    if keys:
        option = f"rng_argnums={keys[0]}" if isinstance(keys[0], int) else f"rng_argnames={keys[0]!r}"
        raise DhelixError(
            f"{_title(keys[0], places)} holds random keys: name it with value_and_grad(..., {option}), so that every "
            "micro-batch draws its own numbers; if all shall draw the same, name the batch instead"
        )
    axes = {key: sorted({x.shape[0] for x in jax.tree.leaves(value) if _has_axis(x)}) for key, value in given.items()}
    axes = {key: some for key, some in axes.items() if some}
    if not axes:
        raise DhelixError(_NO_BATCH)
    if len(axes) > 1:
        each = [f"{_title(key, places)} with {_leading(some)}" for key, some in axes.items()]
        options = [str(key) for key in axes if isinstance(key, int)], [_name(key, places) for key in axes]
        by_number = f" batch_argnums= (of {', '.join(options[0])}) or" if options[0] else ""
        raise DhelixError(
            f"value_and_grad cannot tell which arguments are the batch: arrays are in {'; '.join(each)}. Name those to "
            f"split into micro-batches with{by_number} batch_argnames= (of {', '.join(options[1])}); the others stay "
            "whole. Name random keys with rng_argnums="
        )
    return next(iter(axes))


def _leading(axes: Sequence[int]) -> str:
    shown = ", ".join(map(str, axes[:4])) + (", ..." if len(axes) > 4 else "")
    return f"leading ax{'i' if len(axes) == 1 else 'e'}s {shown}"


def _check_once(uses: Mapping[str, Sequence[Key]]) -> None:
    seen: dict[Key, str] = {}
    for use, keys in uses.items():
        for key in keys:
            if seen.setdefault(key, use) != use:
                raise DhelixError(
                    f"{_title(key)} {seen[key]} and {use}: with micro-batches an argument can be only one of the two"
                )


def _fold_in(number: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, number)


def _has_axis(leaf: Any) -> bool:
    return bool(getattr(leaf, "shape", ()))


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}[]" if hasattr(leaf, "dtype") else f"a Python {type(leaf).__name__}"


def _title(key: Key, places: Sequence[Key] = ()) -> str:
    if isinstance(key, str):
        return f"argument {key}"
    name = places[key] if key < len(places) else key
    return f"argument {key}" if name == key else f"argument {key} ({name})"


def _name(key: Key, places: Sequence[Key]) -> str:
    name = places[key] if isinstance(key, int) else key
    return repr(name) if isinstance(name, str) else f"the name of argument {key}"


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # raised for some builtins, for example
        return None


def _places(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Key]:
    """For each positional argument, the name of its parameter, or its position if the name is unknown."""
    unknown: list[Key] = list(range(len(args)))
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return unknown
    places: list[Key] = []
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            places += [parameter.name] * len(bound.arguments.get(parameter.name, ()))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            passed = parameter.name in bound.arguments and parameter.name not in kwargs
            places += [parameter.name] if passed else []
    return places if len(places) == len(args) else unknown
