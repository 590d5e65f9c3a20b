"""A shard_map in each layer of both strands: their rings become one loop, and five steps equal the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix import strand_interleave, value_and_grad
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule, Instruction, graph
from dhelix.passes.hlo.manual_computation import is_manual
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.runtime.compiler.lowering import hlo_bytes

LAYERS, WIDTH, LENGTH, ROWS, MICROBATCHES, HOPS = 3, 8, 8, 8, 4, 4
MESH = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
SEQUENCE = P("dp", "cp")
Function = Callable[..., Any]


def attention(scanned: bool, hops: int = HOPS) -> Function:
    """Sums over the sequence, whose parts travel around a ring of devices."""

    def one(carry: Any, _: Any) -> Any:
        total, part, x = carry
        scores = jnp.tanh(jnp.einsum("bqd,bkd->bqk", x, part))
        part_after = lax.ppermute(part, "cp", [(i, (i + 1) % HOPS) for i in range(HOPS)])
        return (total + jnp.einsum("bqk,bkd->bqd", scores, part), part_after, x), None

    def local(x: jax.Array) -> jax.Array:
        carry = (0 * x, x, x)
        if scanned:
            return lax.scan(one, carry, None, length=hops)[0][0]
        for _ in range(hops):
            carry, _ = one(carry, None)
        return carry[0]

    return local


def loss(attend: Function, remat: bool = True, **options: Any) -> Function:
    mapped = jax.shard_map(attend, mesh=MESH, in_specs=SEQUENCE, out_specs=SEQUENCE, **options)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + mapped(jnp.tanh(x @ w)), None

    layer = jax.checkpoint(layer) if remat else layer
    return lambda w, x: jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def step(loss: Function) -> Function:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, gradient = value_and_grad(loss)(w, x)
        return w - gradient / 1024, value

    return step


def arguments() -> tuple[jax.Array, jax.Array]:
    random = np.random.RandomState(0)
    w = jnp.asarray(0.3 * random.standard_normal((LAYERS, WIDTH, WIDTH)), jnp.float32)
    x = jnp.asarray(random.standard_normal((ROWS, LENGTH, WIDTH)), jnp.float32)
    return jax.device_put(w, NamedSharding(MESH, P())), jax.device_put(x, NamedSharding(MESH, SEQUENCE))


def five_steps(run: Function) -> Any:
    w, x = arguments()
    values = []
    for _ in range(5):
        w, value = run(w, x)
        values.append(value)
    return np.asarray(w), np.asarray(values)


def merged(run: Any) -> list[str]:
    notes = run.preview(*arguments())["strand-duplication"].notes
    (note,) = [n for n in notes if n.message == "two strands"]
    return [loop.rpartition(" x ")[2] for loop in note.facts["merged_loops"]]


@pytest.mark.parametrize(
    ("loss", "loops"),
    [
        (loss(attention(scanned=True)), [str(LAYERS), str(HOPS)]),
        pytest.param(
            loss(attention(scanned=True), remat=False, check_vma=False),
            [str(LAYERS), str(HOPS)],
            marks=pytest.mark.slow,
        ),
        pytest.param(loss(attention(scanned=False)), [str(LAYERS)], marks=pytest.mark.slow),
    ],
    ids=["scanned ring", "residuals kept, without check_vma", "unrolled ring"],
)
def test_rings_of_both_strands(loss: Function, loops: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = strand_interleave(step(loss), microbatches=MICROBATCHES, strict=True)
    strands = five_steps(run)
    assert merged(run) == loops
    monkeypatch.setenv("DHELIX", "off")
    plain = five_steps(strand_interleave(step(loss), microbatches=MICROBATCHES))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, strands)


def test_the_headline_counts_layers_and_not_the_hops_of_a_ring() -> None:
    report = strand_interleave(step(loss(attention(scanned=True))), microbatches=MICROBATCHES).preview(*arguments())
    assert f"two strands over {LAYERS} layers, {MICROBATCHES} micro-batches" in str(report)


def manual_calls(loss: Function) -> list[Instruction]:
    """Calls of shard_maps in the merged layer loop of a loss."""

    def gradients(w: jax.Array, x: jax.Array) -> Any:
        rows = x.reshape(MICROBATCHES, -1, *x.shape[1:])
        return lax.scan(lambda total, x: (total + jax.grad(loss)(w, x), None), jnp.zeros_like(w), rows)[0]

    module = HloModule.from_bytes(hlo_bytes(jax.jit(gradients).lower(*arguments())))
    assert StrandDuplication().run(module, PassContext())
    (layers,) = [i for i in graph.walk(module.entry) if i.opcode == "while" and i.name.startswith("strand_layers")][:1]
    return [i for i in layers.called[0].instructions if is_manual(i)]


def test_shard_maps_without_loops_stay_apart() -> None:
    """They can overlap without merging, because neither waits inside for what the other one needs."""
    assert len(manual_calls(loss(attention(scanned=False), remat=False))) == 2
    assert len(manual_calls(loss(attention(scanned=True), remat=False))) == 1


def test_of_two_shard_maps_of_one_strand_the_larger_one_merges() -> None:
    """A recomputed layer has two shard_maps in its backward pass."""
    calls = manual_calls(loss(attention(scanned=True)))
    assert len(calls) == 2
    both = [
        c
        for c in calls
        if {"strand_alpha", "strand_beta"} <= {i.op_name.split("/")[0] for i in graph.walk(c.called[0])}
    ]
    assert len(both) == 1 and any("transpose(" in i.op_name for i in graph.walk(both[0].called[0]))
