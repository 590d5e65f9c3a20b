"""Gradients reduced layer by layer: the same numbers, and only in loops where this is legal."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dhelix.models import make_mesh, make_train_step, preset
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED, UNCHANGED, PassReport
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.edit import inline_calls
from dhelix.runtime.compiler import lowering
from dhelix.runtime.step.pass_lists import default_passes, strand_passes
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.quick import slow_after

LAYERS, WIDTH = 4, 16
ANY = GradientReduction(least=0)

type Reduce = Callable[[jax.Array], jax.Array]


def mean(gradient: jax.Array) -> jax.Array:
    return lax.pmean(gradient / 3.0, "dp")


def lowered(reduce: Reduce, layers: int = LAYERS) -> tuple[jax.stages.Lowered, tuple[jax.Array, ...]]:
    """A program that passes gradients of stacked layers on 4 replicas to `reduce`, and its arguments."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]))

    def local(weights: jax.Array, x: jax.Array) -> jax.Array:
        return reduce(jax.grad(loss)(weights, x))

    mesh = jax.make_mesh((4, 2), ("dp", "other"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False))
    draw = np.random.default_rng(0)
    given = draw.standard_normal((layers, WIDTH, WIDTH)) / 4, draw.standard_normal((8, WIDTH))
    arrays = tuple(jnp.asarray(g, jnp.float32) for g in given)
    return step.lower(*arrays), arrays


def reduced(program: jax.stages.Lowered, one: GradientReduction = ANY) -> tuple[bytes | None, PassReport]:
    module = HloModule.from_bytes(lowering.hlo_bytes(program))
    for loop in [i for c in module.computations for i in c.instructions if i.opcode == "while"]:
        inline_calls(loop.called[0])  # as strand duplication does
    new, report = PassManager([one], strict=True).run(Stage.LOWERED, module.to_bytes())
    return new, report.passes[0]


@pytest.mark.parametrize(
    "reduce",
    slow_after(
        3,
        [
            mean,
            lambda g: lax.psum(g, "dp"),
            lambda g: lax.pmax(2.0 - g, "dp"),
            lambda g: lax.psum(g * lax.axis_index("other").astype(g.dtype), "dp"),  # the factor is not a constant
            lambda g: lax.psum(g, ("dp", "other")),
        ],
    ),
    ids=["mean", "sum", "maximum", "weighted", "two axes"],
)
@pytest.mark.parametrize("layers", [2, LAYERS])
def test_all_bits_are_those_of_the_reduced_stack(reduce: Reduce, layers: int) -> None:
    program, arrays = lowered(reduce, layers)
    new, report = reduced(program)
    assert new is not None and [note.message for note in report.notes] == ["gradients reduced layer by layer"]
    found = lowering.with_hlo(program, new).compile()(*arrays)
    np.testing.assert_array_equal(found, program.compile()(*arrays))


def test_a_layer_is_reduced_in_the_iteration_after_its_own() -> None:
    new, _ = reduced(lowered(mean)[0])
    assert new is not None
    module = HloModule.from_bytes(new)
    sizes = {
        computation.name: [list(i.shape.dimensions) for i in computation.instructions if i.opcode == "all-reduce"]
        for computation in module.computations
        if any(i.opcode == "all-reduce" for i in computation.instructions)
    }
    assert list(sizes.values()) == [[[1, WIDTH, WIDTH]]] * 2, "in the loop, and the last one behind it"
    owner = next(c for c in module.computations if c.name in sizes and any(i.opcode == "while" for i in c.instructions))
    assert sum(i.opcode == "while" for i in owner.instructions) == 3, "forward, the first iteration, and the others"


@pytest.mark.parametrize(
    "reduce",
    [
        lambda g: mean(g) + jnp.sum(g),  # also reads the stack before the reduction
        lambda g: lax.pmean(jnp.cumsum(g, axis=0), "dp"),  # a layer's sum depends on other layers
        lambda g: lax.pmean(jnp.flip(g, 0), "dp"),
        lambda g: lax.pmean(g * jnp.arange(LAYERS, dtype=g.dtype)[:, None, None], "dp"),  # another factor per layer
        lambda g: lax.psum_scatter(g, "dp", scatter_dimension=0, tiled=True).sum(0, keepdims=True) * jnp.ones_like(g),
        lambda g: lax.pmean(g.astype(jnp.bfloat16), "dp").astype(jnp.float32),
    ],
    ids=["read twice", "sums over layers", "turned round", "scaled by layer", "layers scattered", "another type"],
)
def test_what_is_no_such_reduction_stays(reduce: Reduce) -> None:
    new, report = reduced(lowered(reduce)[0])
    assert new is None and report.outcome == UNCHANGED


LOOP = """HloModule m
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
body {
  p = (s32[], f32[4,8,8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  stack = f32[4,8,8] get-tuple-element(p), index=1
  one = s32[] constant(1)
  zero = s32[] constant(0)
  next = s32[] add(i, one)
  half = f32[] constant(0.5)
  slot = f32[1,8,8] broadcast(half), dimensions={}
  write = f32[4,8,8] dynamic-update-slice(stack, slot, i, zero, zero)
  ROOT t = (s32[], f32[4,8,8]) tuple(next, write)
}
condition {
  p = (s32[], f32[4,8,8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  four = s32[] constant(4)
  ROOT less = pred[] compare(i, four), direction=LT
}
ENTRY e {
  a = f32[4,8,8] parameter(0)
  zero = s32[] constant(0)
  t = (s32[], f32[4,8,8]) tuple(zero, a)
  w = (s32[], f32[4,8,8]) while(t), condition=condition, body=body
  g = f32[4,8,8] get-tuple-element(w), index=1
  r = f32[4,8,8] all-reduce(g), to_apply=sum, replica_groups={{0,1}}, channel_id=1, use_global_device_ids=true
  END
}"""


@pytest.mark.parametrize(
    ("end", "taken"),
    [
        ("ROOT q = f32[4,8,8] negate(r)", True),
        ("ROOT h = f32[4,8,8] get-tuple-element(w), index=1", False),
        ("k = f32[4,8,8] negate(r), control-predecessors={w}\n ROOT q = f32[4,8,8] negate(k)", False),
        ("k = f32[4,8,8] negate(a), control-predecessors={r}\n ROOT q = f32[4,8,8] add(r, k)", False),
    ],
    ids=["alone", "returned too", "behind the loop", "behind the reduction"],
)
def test_what_else_hangs_on_the_loop_or_the_reduction_stays_right(end: str, taken: bool) -> None:
    module = HloModule.from_text(LOOP.replace("END", end))
    new, report = PassManager([ANY], strict=True).run(Stage.LOWERED, module.to_bytes())
    assert (new is not None) is taken, report.passes[0].notes


def test_without_measured_costs_a_user_s_step_keeps_its_reductions() -> None:
    (one,) = (p for p in default_passes() if isinstance(p, GradientReduction))
    new, report = reduced(lowered(mean)[0], replace(one, least=0))
    assert new is None and "no measured costs" in report.notes[0].message


def test_small_layers_and_groups_of_one_device_stay() -> None:
    assert reduced(lowered(mean)[0], GradientReduction(least=4 * WIDTH * WIDTH + 1))[0] is None
    assert reduced(lowered(mean)[0], GradientReduction(least=4 * WIDTH * WIDTH))[0] is not None
    alone = make_train_step(preset("llama-demo", 2), make_mesh(1, 4), optax.sgd(0.1), 2)
    step = jax.jit(alone.train_step).lower(alone.abstract_state(), alone.abstract_batch(2))
    assert reduced(step)[0] is None


def test_costs_decide() -> None:
    """Over sockets, many small messages cost more than the compute of a small layer hides."""
    program, _ = lowered(mean)
    model = CostModel.find("H200", "two-nodes", "sockets")
    new, report = reduced(program, replace(ANY, model=model))
    assert new is None
    assert [note.message for note in report.notes] == [
        "left alone: reducing gradients layer by layer costs more time than it hides"
    ]


def test_where_each_micro_batch_is_reduced_only_the_last_backward_changes() -> None:
    """The co-executed loop keeps its stacks whole, because the other strand's compute hides their reduction."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(lax.scan(lambda x, w: (x + lax.pmean(jnp.tanh(x @ w), "dp"), None), x, weights)[0]))

    def local(weights: jax.Array, batches: jax.Array) -> jax.Array:
        def micro_batch(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + lax.pmean(jax.grad(loss)(weights, x), "dp"), None

        return weights - lax.scan(micro_batch, jnp.zeros_like(weights), batches)[0]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=False)
    draw = np.random.default_rng(0)
    weights = jnp.asarray(draw.standard_normal((LAYERS, WIDTH, WIDTH)) / 4, jnp.float32)
    batches = jnp.asarray(draw.standard_normal((5, 8, WIDTH)), jnp.float32)
    strands = strand_interleave(step, passes=(*strand_passes(), ANY), strict=True)
    # Sums over micro-batches first and devices last; the plain step adds in another order.
    np.testing.assert_allclose(strands(weights, batches), jax.jit(step)(weights, batches), rtol=1e-5, atol=1e-6)
    (note,) = strands.report(weights, batches)[GradientReduction.name].notes
    assert not (note.instruction or "").startswith("strand_layers")


@pytest.mark.slow
def test_the_last_backward_of_two_strands() -> None:
    training = make_train_step(preset("llama-demo", 3), make_mesh(4, 2), optax.sgd(0.1, momentum=0.9), 3)
    options = {"xla_backend_optimization_level": 0}  # compiles fast
    plain: Any = jax.jit(training.train_step, compiler_options=options)
    passes = *strand_passes(), ANY
    strands = strand_interleave(training.train_step, passes=passes, strict=True, compiler_options=options)
    state = other = training.init(jax.random.key(0))
    for n in range(2):
        tokens = np.random.default_rng(n).integers(0, 256, (12, 129)).astype(np.int32)
        batch = {"tokens": jax.device_put(tokens, training.batch_sharding)}
        state, metrics = plain(state, batch)
        other, found = strands(other, batch)
        assert float(metrics["loss"]) == pytest.approx(float(found["loss"]), rel=1e-6)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    report = strands.report(training.abstract_state(), training.abstract_batch(12))
    assert report[GradientReduction.name].outcome == CHANGED


def test_two_loops_of_some_of_the_layers_each_are_left_alone() -> None:
    """Two strands that are skewed by one layer end with such loops."""
    training = make_train_step(preset("llama-demo", 3), make_mesh(4, 2), optax.sgd(0.1), 3)
    lowered = jax.jit(training.train_step).lower(training.abstract_state(), training.abstract_batch(12))
    manager = PassManager((*strand_passes(1), ANY), strict=True)
    _, report = manager.run(Stage.LOWERED, lowering.hlo_bytes(lowered))
    assert {p.name: p.outcome for p in report.passes}[GradientReduction.name] == UNCHANGED
