"""Sums over replicas under automatic sharding: closed once per step on any mesh, with the plain step's results."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.framework.report import CHANGED
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.step.pass_lists import strand_passes
from dhelix.tests.passes.strands.gradients.reductions import reduced_in_loops
from dhelix.tests.quick import slow_but

LAYERS, WIDTH, HEADS, HEAD, HIDDEN, WORDS, LENGTH, MICROBATCHES, STEPS = 3, 8, 2, 4, 16, 12, 8, 3, 5
TOLERANCE = 5e-6  # relative: additions of float32 in another order, five steps
OPTIONS = {"xla_backend_optimization_level": 0}  # compiles fast


class Case:
    """A small transformer on a mesh; with `own`, the step accumulates in its own loop."""

    def __init__(self, axes: dict[str, int], own: bool = False, constrained: bool = False, tied: bool = False) -> None:
        self.mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values()), tuple(axes))
        tp, self.cp, fsdp = (name if name in axes else None for name in ("tp", "cp", "fsdp"))
        self.rows = tuple(name for name in ("dp", "fsdp") if name in axes) or None
        self.own, self.constrained, self.tied = own, constrained, tied
        self.specs = {
            "embed": P(), "head": P(fsdp, tp), "last": P(),
            "layers": {
                "qkv": P(None, fsdp, None, tp), "out": P(None, tp, None, fsdp), "up": P(None, fsdp, tp),
                "down": P(None, tp, fsdp), "scale": P(), "bias": P(None, tp),
            },
        }  # fmt: skip
        self.devices = math.prod(axes[name] for name in self.rows or ())

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def parameters(self) -> Any:
        shapes = {
            "embed": (WORDS, WIDTH), "head": (WIDTH, WORDS), "last": (WIDTH,),
            "layers": {
                "qkv": (LAYERS, WIDTH, 3, HEADS, HEAD), "out": (LAYERS, HEADS, HEAD, WIDTH),
                "up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH),
                "scale": (LAYERS, WIDTH), "bias": (LAYERS, HIDDEN),
            },
        }  # fmt: skip
        random = np.random.default_rng(0)

        def put(spec: P, shape: tuple[int, ...]) -> jax.Array:
            return jax.device_put(random.standard_normal(shape).astype(np.float32) * 0.3, self.sharding(spec))

        return jax.tree.map(put, self.specs, shapes, is_leaf=lambda x: isinstance(x, P))

    def batches(self) -> list[jax.Array]:
        random = np.random.default_rng(1)
        shape = (2 * self.devices * MICROBATCHES, LENGTH + 1)
        numbers = [random.integers(0, WORDS, shape).astype(np.int32) for _ in range(STEPS)]
        return [jax.device_put(tokens, self.sharding(P(self.rows))) for tokens in numbers]

    def loss(self, w: Any, tokens: jax.Array) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

        @jax.checkpoint
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            x = jax.lax.with_sharding_constraint(x, self.sharding(P(self.rows, self.cp)))
            q, k, v = jnp.einsum("bse,ethd->tbhsd", norm(x) * w["scale"], w["qkv"])
            heads = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k)), v)
            x = x + jnp.einsum("bhsd,hde->bse", heads, w["out"])
            return x + jnp.tanh(norm(x) @ w["up"] + w["bias"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, w["embed"][tokens[:, :-1]], w["layers"])
        head = w["embed"].T if self.tied else w["head"]
        scores = jax.nn.log_softmax((norm(x) * w["last"]) @ head)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

    def step(self, w: Any, tokens: jax.Array) -> Any:
        if self.own:

            def one(total: Any, tokens: jax.Array) -> Any:
                value, grads = jax.value_and_grad(self.loss)(w, tokens)
                if self.constrained:
                    grads = jax.lax.with_sharding_constraint(grads, jax.tree.map(self.sharding, self.specs))
                return jax.tree.map(jnp.add, total, grads), value

            rows = tokens.reshape(-1, MICROBATCHES, LENGTH + 1).swapaxes(0, 1)
            grads, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, w), rows)
            value, grads = values.mean(), jax.tree.map(lambda g: g / MICROBATCHES, grads)
        else:
            value, grads = value_and_grad(self.loss)(w, tokens)
        return jax.tree.map(lambda p, g: p - 0.3 * g, w, grads), value

    def ours(self, **options: Any) -> Any:
        microbatches = None if self.own else MICROBATCHES
        return strand_interleave(self.step, microbatches=microbatches, compiler_options=OPTIONS, **options)


CASES = {
    "dp": Case({"dp": 4}),
    "dp x cp x tp": Case({"dp": 2, "cp": 2, "tp": 2}),
    "dp x fsdp": Case({"dp": 2, "fsdp": 2}),
    "own loop, dp x tp": Case({"dp": 2, "tp": 2}, own=True),
    "own loop, constrained": Case({"dp": 2, "fsdp": 2}, own=True, constrained=True),
    "tied embeddings": Case({"dp": 2, "tp": 2}, tied=True),
}


@pytest.mark.parametrize("name", slow_but(["dp"], CASES))
def test_five_steps_are_the_plain_steps(name: str) -> None:
    ours = train(CASES[name])
    assert ours["replica-sums"].outcome == CHANGED, ours["replica-sums"].notes


@pytest.mark.slow
def test_reduced_layer_by_layer_in_the_last_backward_pass() -> None:
    passes = (*strand_passes(), GradientReduction(least=0))
    report = train(CASES["dp x cp x tp"], passes=passes)
    assert "layer by layer" in report["gradient-reduction"].notes[0].message


def test_programs_lowered_for_gspmd() -> None:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert train(Case({"dp": 2, "tp": 2}))["replica-sums"].outcome == CHANGED
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_rows_that_do_not_divide_keep_their_own_gradient_closed() -> None:
    """The sequences have 10 tokens, split over "cp", but only the first 9 are embedded. Other gradients stay open."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "cp"))

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), w["embed"][tokens[:, :-1]], w["layers"])
        return jnp.mean((x @ w["head"]) ** 2)

    def step(w: Any, tokens: jax.Array) -> Any:
        value, grads = value_and_grad(loss)(w, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    random = np.random.default_rng(0)
    sizes = {"embed": (WORDS, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, WIDTH)}
    w = {name: 0.3 * random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    w = jax.device_put(w, NamedSharding(mesh, P()))
    tokens = random.integers(0, WORDS, (8, 10)).astype(np.int32)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("dp", "cp")))
    ours = strand_interleave(step, microbatches=2)
    plain = strand_interleave(step, microbatches=2, passes=())
    for got, want in zip(jax.tree.leaves(ours(w, tokens)), jax.tree.leaves(plain(w, tokens)), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    entry = ours.report(w, tokens)["replica-sums"]
    assert entry.outcome == CHANGED, entry.notes


def test_dropout_with_a_key_on_one_device() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), "dp")

    def loss(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        def layer(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
            w, key = given
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), jnp.tanh(x @ w), 0), None

        return jnp.mean(jax.lax.scan(layer, x, (w, jax.random.split(key, len(w))))[0] ** 2)

    def step(w: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        return value_and_grad(loss, batch_argnums=1, rng_argnums=2)(w, x, key)

    random = np.random.default_rng(0)
    w = jax.device_put((random.standard_normal((3, 8, 8)) * 0.3).astype(np.float32), NamedSharding(mesh, P()))
    x = jax.device_put(random.standard_normal((8, 8)).astype(np.float32), NamedSharding(mesh, P("dp")))
    ours = strand_interleave(step, microbatches=2, strict=True)
    plain = strand_interleave(step, microbatches=2, passes=())
    given = w, x, jax.random.key(0)
    for got, want in zip(jax.tree.leaves(ours(*given)), jax.tree.leaves(plain(*given)), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert not reduced_in_loops(compiled_module(ours.lower(*given).compile()), mesh)
    assert ours.report(*given)["replica-sums"].outcome == CHANGED


@pytest.mark.parametrize("by_hand", [False, True])
def test_accumulators_that_change_places_are_one(by_hand: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), "dp")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2)

    def step(w: jax.Array, rows: jax.Array) -> Any:
        def one(totals: Any, x: jax.Array) -> Any:
            g = jax.grad(loss)(w, x)
            g = jax.lax.pmean(g, "dp") if by_hand else g
            return (totals[1] + g, totals[0] + 2 * g), None

        return jax.lax.scan(one, (jnp.zeros(w.shape), jnp.zeros(w.shape)), rows)[0]

    if by_hand:
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=False)
    random = np.random.default_rng(0)
    w = jax.device_put((random.standard_normal((3, 8, 8)) * 0.3).astype(np.float32), NamedSharding(mesh, P()))
    rows = random.standard_normal((4, 8, 8)).astype(np.float32)
    rows = jax.device_put(rows, NamedSharding(mesh, P(None, "dp")))
    ours = strand_interleave(step, strict=True)
    for want, got in zip(jax.jit(step)(w, rows), ours(w, rows), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["squares", "rounded to integers", "padded", "float16", "by hand, to integers"])
def test_what_is_no_sum_of_its_parts_stays_right(kind: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), "dp")
    dtype = jnp.float16 if kind == "float16" else jnp.float32
    scale = 300.0 if kind == "float16" else 1.0  # sums of micro-batches exceed float16

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x.astype(dtype), w)
        return scale * jnp.sum(y.astype(jnp.float32) ** 2)

    def added(w: jax.Array, x: jax.Array) -> jax.Array:
        g = jax.grad(loss)(w, x).astype(jnp.float32)
        if kind == "by hand, to integers":
            g = jax.lax.pmean(g, "dp")
        if "integers" in kind:
            return (100 * g).astype(jnp.int32).astype(jnp.float32)
        if kind == "padded":
            return jax.lax.pad(g, 1.0, ((0, 0, 0), (0, 0, 0), (1, 0, 0)))[..., :-1]
        return g * g if kind == "squares" else g

    def step(w: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c + added(w, x), None), jnp.zeros(w.shape), rows)[0]

    if kind == "by hand, to integers":
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=False)
    random = np.random.default_rng(0)
    w = jax.device_put((random.standard_normal((3, 8, 8)) * 0.3).astype(dtype), NamedSharding(mesh, P()))
    rows = random.standard_normal((4, 8, 8)).astype(np.float32)
    rows = jax.device_put(rows, NamedSharding(mesh, P(None, "dp")))
    want, got = jax.jit(step)(w, rows), strand_interleave(step, strict=True)(w, rows)
    tolerance = 2.0**-8 if kind == "float16" else 1e-4
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * float(jnp.abs(want).max()))


def train(case: Case, **options: Any) -> Any:
    """Compares five steps with the plain step. Returns the report of the passes."""
    plain, ours = jax.jit(case.step, compiler_options=OPTIONS), case.ours(**options)
    w = want = case.parameters()
    for tokens in case.batches():
        w, value = ours(w, tokens)
        want, expected = plain(want, tokens)
        np.testing.assert_allclose(value, expected, rtol=TOLERANCE)
    for got, leaf in zip(jax.tree.leaves(w), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, leaf, rtol=TOLERANCE, atol=TOLERANCE)
    assert not reduced_in_loops(compiled_module(ours.lower(w, tokens).compile()), case.mesh)
    return ours.report(w, tokens)
