"""Generated loss functions: `value_and_grad` over micro-batches equals `jax.value_and_grad` of the whole batch.

Each program is checked for: the structure of the result; types of all leaves, including weak ones; numbers, within a
few roundings on the scale of the gradients. StableHLO's reference interpreter runs both programs, without a compiler.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from dhelix.runtime.step.microbatches.value_and_grad import microbatching, value_and_grad
from dhelix.tests.passes.interpreter import interpret
from dhelix.tests.quick import slow_after

PROGRAMS = [12, pytest.param(30, marks=pytest.mark.slow)]  # different programs per family
FAMILIES = {
    "float32": ("float32",), "half": ("bfloat16", "float16"), "complex": ("complex64", "holomorphic"),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
}  # fmt: skip
WIDTH, DEPTH = 3, 2

# Parameter types, and the largest difference relative to the largest gradient (at least 0.05).
DTYPES = {
    "float32": 2e-5, "bfloat16": 0.06, "float16": 0.01, "complex64": 2e-5, "holomorphic": 2e-5,
    "float8_e4m3fn": 0.3, "float8_e5m2": 0.3,
}  # fmt: skip
STRUCTURES = ("array", "dictionary", "weak", "nested", "dataclass", "integers")
BATCHES = ("array", "dictionary", "nested", "two arguments", "tokens")
LAYERS = ("one", "one", "one", "unrolled", "scan", "remat", "reversed")
CALLABLES = ("function", "partial", "method", "jit", "checkpoint", "object")
AUXILIARIES = ("none", "number", "count", "rows", "half rows", "nested", "weak", "python")
ARGNUMS = ("number", "negative", "tuple", "list", "both", "both reversed")
NAMINGS = ("default", "positions", "negative", "names")
EXTRAS = ("frozen", "key", "activation", "bias")


@dataclass(frozen=True)
class Program:
    """A loss function and a call of it.

    Attributes:
      rows: rows of one micro-batch.
      extras: arguments in addition to parameters and batch.
      order: seed for the order of the arguments.
      keywords: arguments that are passed by keyword.
    """

    microbatches: int
    rows: int
    dtype: str
    structure: str
    batch: str
    layers: str
    callable: str
    auxiliary: str
    argnums: str
    naming: str
    reduce: str
    extras: tuple[str, ...]
    order: int
    keywords: tuple[str, ...]

    @property
    def batch_names(self) -> list[str]:
        return ["x", "y"] if self.batch == "two arguments" else ["batch"]

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of all arguments, positional ones first."""
        names = ["params", *self.batch_names, *self.extras]
        np.random.RandomState(self.order).shuffle(names)
        return sorted(names, key=lambda name: name in self.keywords)  # a stable sort keeps the order otherwise

    @property
    def positional(self) -> list[str]:
        return [name for name in self.names if name not in self.keywords]


def drawn(family: str) -> st.SearchStrategy[Program]:
    def some(values: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
        return st.lists(st.sampled_from(values), max_size=2, unique=True).map(sorted).map(tuple)

    return st.builds(
        Program,
        microbatches=st.sampled_from((2, 3, 4, 5)),
        rows=st.sampled_from((1, 2, 3)),
        dtype=st.sampled_from(FAMILIES[family]),
        structure=st.sampled_from(STRUCTURES),
        batch=st.sampled_from(BATCHES),
        layers=st.sampled_from(LAYERS),
        callable=st.sampled_from(CALLABLES),
        auxiliary=st.sampled_from(AUXILIARIES),
        argnums=st.sampled_from(ARGNUMS),
        naming=st.sampled_from(NAMINGS),
        reduce=st.sampled_from(("mean", "sum", "weighted")),
        extras=some(EXTRAS),
        order=st.integers(0, 9),
        keywords=some(("x", "y", "batch", "frozen", "key", "activation")),
    )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "nothing", "scale"], meta_fields=["name"])
@dataclass
class Weights:
    w: Any
    nothing: None
    scale: Any
    name: str


def parameters(program: Program) -> Any:
    dtype = "complex64" if program.dtype == "holomorphic" else program.dtype
    w = _random(1, DEPTH, WIDTH, WIDTH, dtype=dtype)
    match program.structure:
        case "dictionary":
            return {"w": w, "scale": _random(2, dtype=dtype)}
        case "weak":
            return {"w": w, "scale": 1.5 + 0j if dtype == "complex64" else 1.5}
        case "nested":
            return {"layers": [{"w": w[0]}, {"w": w[1], "none": None}], "scale": (_random(2, dtype=dtype),)}
        case "dataclass":
            return Weights(w, None, _random(2, 1, dtype=dtype), "model")
        case "integers" if program.dtype != "holomorphic":
            return {"w": w, "count": jnp.int32(3), "flags": jnp.array([True, False]), "step": 4}
    return w


def weights_and_scale(params: Any) -> tuple[Any, Any]:
    if isinstance(params, Weights):
        return params.w, params.scale[0]
    if not isinstance(params, dict):
        return params, None
    scale = params.get("scale")
    if "layers" in params:
        return jnp.stack([layer["w"] for layer in params["layers"]]), scale[0]  # type: ignore[index]
    return params["w"], scale


def arguments(program: Program) -> dict[str, Any]:
    """Arguments by name, with the arrays of the whole batch."""
    rows, dtype = program.rows * program.microbatches, "complex64" if program.dtype == "holomorphic" else "float32"
    x, y = _random(3, rows, WIDTH, dtype=dtype).at[0, 0].set(1), _random(4, rows, WIDTH, dtype=dtype)
    batches = {
        "array": {"batch": x}, "dictionary": {"batch": {"x": x, "y": y}}, "nested": {"batch": (x, {"y": [y, None]})},
        "two arguments": {"x": x, "y": y}, "tokens": {"batch": {"x": x, "token": jnp.arange(rows, dtype=jnp.int8)}},
    }  # fmt: skip
    bias = _random(5, WIDTH, dtype="complex64" if program.dtype == "holomorphic" else "float32")
    # These have as many rows as the batch, but are no part of it.
    extras = {"frozen": _random(6, rows, WIDTH), "key": jax.random.key(7), "activation": None, "bias": bias}
    given = {"params": parameters(program), **batches[program.batch], **extras}
    return {name: given[name] for name in program.names}


def _random(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    random = np.random.RandomState(seed)
    values = random.standard_normal(shape) + (1j * random.standard_normal(shape) if dtype == "complex64" else 0)
    return jnp.asarray(0.5 * values).astype(dtype)


def inputs(given: dict[str, Any]) -> tuple[Any, Any]:
    """x and y of a batch, or of a micro-batch."""
    if "x" in given:
        return given["x"], given["y"]
    match given["batch"]:
        case {"x": x, "token": token}:
            return x * lax.expand_dims(token % 3, (1,)).astype(x.dtype), None
        case {"x": x, "y": y}:
            return x, y
        case (x, {"y": [y, None]}):
            return x, y
    return given["batch"], None


def counted(given: dict[str, Any]) -> jax.Array:
    """Rows that count under reduce="weighted"."""
    return inputs(given)[0][:, 0].real > -0.2


def loss(program: Program, given: dict[str, Any]) -> Any:
    w, scale = weights_and_scale(given["params"])
    x, y = inputs(given)
    wide = jnp.float32 if program.dtype.startswith("float8") else w.dtype
    w, h = w.astype(wide), x.astype(wide)
    activation = given["activation"] if "activation" in program.extras else lax.tanh

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return activation(lax.dot(h, w)), None

    if "key" in given:  # changes nothing, for any key
        h = h * (jax.random.key_data(given["key"])[0] >= 0).astype(wide)
    if program.layers in ("one", "unrolled"):
        for index in range(1 if program.layers == "one" else DEPTH):
            h = layer(h, w[index])[0]
    else:
        body = jax.checkpoint(layer) if program.layers == "remat" else layer
        h = lax.scan(body, h, w, reverse=program.layers == "reversed")[0]
    h = h if scale is None else h * jnp.asarray(scale).astype(wide)
    h = h + given["bias"].astype(wide) if "bias" in given else h
    h = h + lax.reduce_sum(given["frozen"], (0,)).astype(wide) / 8 if "frozen" in given else h
    difference = h if y is None else h - y.astype(wide)
    if program.dtype == "complex64":
        difference = lax.abs(difference)
    squares = difference * difference
    value = total(program, lax.reduce_sum(squares, (1,)), counted(given))
    return value if program.auxiliary == "none" else (value, auxiliary(program, given, h, scale))


def total(program: Program, rows: jax.Array, counts: jax.Array) -> jax.Array:
    if program.reduce == "mean":
        return lax.reduce_sum(rows, (0,)) / len(rows)
    if program.reduce == "sum":
        return lax.reduce_sum(rows, (0,))
    counts = counts.astype(rows.dtype)
    return lax.reduce_sum(rows * counts, (0,)) / lax.max(lax.reduce_sum(counts, (0,)), rows.dtype.type(1))


def auxiliary(program: Program, given: dict[str, Any], h: jax.Array, scale: Any) -> Any:
    number = total(program, lax.reduce_sum(lax.abs(h), (1,)), counted(given))
    match program.auxiliary:
        case "number":
            return number
        case "count":
            return jnp.sum(h.real > 0, axis=0)
        case "rows":
            return h
        case "half rows":
            return [h.real.astype(jnp.bfloat16)]
        case "nested":
            return {"rows": (h[:, 0].real > 0, None), "number": number, "n": len(h)}
        case "weak" if program.reduce != "sum" and scale is not None:
            return {"scale": scale}
        case "python" if program.reduce != "sum":
            return {"two": 2.0, "rows": len(h)}
    return {}


def callable_of(program: Program) -> Callable[..., Any]:
    """The loss function, with the program's parameter names in its signature."""
    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in program.names]
    first = inspect.Parameter("first", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def function(*args: Any, **kwargs: Any) -> Any:
        return loss(program, dict(zip(program.names, args, strict=False)) | kwargs)

    def with_first(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    class Model:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        __call__.__signature__ = inspect.Signature([first, *named])  # type: ignore[attr-defined]

    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    with_first.__signature__ = inspect.Signature([first, *named])  # type: ignore[attr-defined]
    match program.callable:
        case "partial":
            return functools.partial(with_first, 0)
        case "method":
            return types.MethodType(with_first, "self")
        case "jit" if "activation" not in program.extras:
            return jax.jit(function)
        case "checkpoint" if "activation" not in program.extras:
            return jax.checkpoint(function)
        case "object":
            return Model()
    return function


def jax_options(program: Program) -> dict[str, Any]:
    count, place = len(program.positional), program.positional.index("params")
    argnums: Any = {"negative": place - count, "tuple": (place,), "list": [place - count]}.get(program.argnums, place)
    if program.argnums.startswith("both") and "bias" in program.extras:
        argnums = (place, program.positional.index("bias"))
        argnums = argnums[::-1] if program.argnums.endswith("reversed") else argnums
    return {
        "argnums": argnums, "has_aux": program.auxiliary != "none", "holomorphic": program.dtype == "holomorphic",
        "allow_int": program.structure == "integers",
    }  # fmt: skip


def our_options(program: Program) -> dict[str, Any]:
    """Options that name batch and keys: by position if possible, otherwise by name, or not at all if that suffices."""
    count, options = len(program.positional), {}
    for prefix, names in (("batch", program.batch_names), ("rng", [name for name in program.extras if name == "key"])):
        by_name = program.naming == "names" or not set(names) <= set(program.positional)
        if by_name:
            options[f"{prefix}_argnames"] = names
        else:
            shift = count if program.naming == "negative" else 0
            options[f"{prefix}_argnums"] = [program.positional.index(name) - shift for name in names]
    differentiated = jax_options(program)["argnums"]
    both = isinstance(differentiated, tuple) and len(differentiated) > 1
    arrays = len(program.batch_names) + ("frozen" in program.extras) + ("bias" in program.extras and not both)
    if program.naming == "default" and arrays == 1:
        options = {name: value for name, value in options.items() if not name.startswith("batch")}
    if program.reduce == "weighted":
        names = program.names

        def weigh(*args: Any, **kwargs: Any) -> jax.Array:
            return counted(dict(zip(names, args, strict=False)) | kwargs).sum()

        options["weights"] = weigh
    return {**options, "reduce": program.reduce}


def call(program: Program, function: Callable[..., Any], microbatches: int) -> Any:
    given = {**arguments(program), "activation": jnp.sin}
    args = [given[name] for name in program.positional]
    with microbatching(microbatches, "mean"):
        return function(*args, **{name: given[name] for name in program.names if name in program.keywords})


def check(program: Program) -> None:
    options = jax_options(program)
    plain = jax.value_and_grad(callable_of(program), **options)
    ours = value_and_grad(callable_of(program), **options, **our_options(program))

    def both() -> list[list[jax.Array]]:
        """Makes all inputs inside, and returns parts in float32, because the interpreter supports few types."""
        want, got = call(program, plain, 1), call(program, ours, program.microbatches)
        assert jax.tree.structure(want) == jax.tree.structure(got)
        assert [_type(x) for x in jax.tree.leaves(want)] == [_type(x) for x in jax.tree.leaves(got)]
        return [_parts(want), _parts(got)]

    values = interpret(jax.jit(both).lower(), ())
    want, got = values[: len(values) // 2], values[len(values) // 2 :]
    scale = max(float(np.abs(x).max(initial=0)) for x in want)
    for one, other in zip(want, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=DTYPES[program.dtype] * max(scale, 0.05))


def _type(x: Any) -> tuple[Any, ...]:
    like = jax.typeof(x)
    return like.shape, like.dtype, like.weak_type


def _parts(tree: Any) -> list[jax.Array]:
    leaves = [x for x in map(jnp.asarray, jax.tree.leaves(tree)) if x.dtype != jax.dtypes.float0]
    parts = [part for x in leaves for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    return [part.astype(jnp.float32) for part in parts]


@pytest.mark.parametrize("programs", slow_after(1, PROGRAMS))
@pytest.mark.parametrize("family", FAMILIES)
def test_as_jax_value_and_grad_of_the_whole_batch(family: str, programs: int) -> None:
    checked: set[Program] = set()
    failed: list[Program] = []  # after the first failure hypothesis shrinks, and checks everything that it tries

    @hypothesis.settings(max_examples=programs + 15, suppress_health_check=(hypothesis.HealthCheck.too_slow,))
    @hypothesis.given(drawn(family))
    def run(program: Program) -> None:
        if failed or (program not in checked and len(checked) < programs):
            failed.append(program)
            check(program)
            checked.add(failed.pop())

    run()
    assert len(checked) == programs
