"""Barriers between the strands of unrolled layers, on small train steps that are executed before and after."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhelix.passes.analysis.names import ALPHA, BETA
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import UNCHANGED, PassReport
from dhelix.passes.hlo import HloModule, Instruction, graph
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.passes.strands.strand_lockstep import StrandLockstep
from dhelix.runtime.compiler import lowering
from dhelix.tests.passes import golden

GOLDEN = "strand_lockstep/unrolled.hlo"
DEPTH, MICROBATCHES, WIDTH = 4, 3, 8
LAYER = tuple[jax.Array, jax.Array]


def mlp(x: jax.Array, layer: LAYER) -> jax.Array:
    up, down = layer
    return x + jnp.tanh(x @ up) @ down


def without_skip(x: jax.Array, layer: LAYER) -> jax.Array:
    up, down = layer
    return jnp.tanh(jnp.tanh(x @ up) @ down)


def no_work(x: jax.Array, layer: LAYER) -> jax.Array:
    return jnp.tanh(x * layer[0][0])


def step(layer: Callable[..., jax.Array], scan: bool = False) -> Callable[..., Any]:
    def loss(layers: LAYER, rows: jax.Array) -> jax.Array:
        x = rows
        if scan:
            x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, layers)
        else:
            for n in range(DEPTH):
                x = layer(x, (layers[0][n], layers[1][n]))
        return jnp.mean(jnp.square(x))

    def train_step(layers: LAYER, batch: jax.Array) -> Any:
        def micro_batch(total: Any, rows: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(layers, rows)), None

        start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, layers))
        return jax.lax.scan(micro_batch, start, batch)[0]

    return train_step


def arguments() -> tuple[LAYER, jax.Array]:
    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(DEPTH, WIDTH, WIDTH)), jnp.float32) for _ in range(2)]
    return (weights[0], weights[1]), jnp.asarray(draw.normal(size=(MICROBATCHES, 2, WIDTH)), jnp.float32)


def transform(function: Callable[..., Any]) -> tuple[jax.stages.Lowered, jax.stages.Lowered, PassReport]:
    """The step, the step after the passes, and the report of `StrandLockstep`."""
    plain = jax.jit(function).lower(*arguments())
    manager = PassManager([StrandDuplication(), StrandLockstep()], strict=True)
    changed, report = manager.run(Stage.LOWERED, lowering.hlo_bytes(plain))
    assert changed is not None
    return plain, lowering.with_hlo(plain, changed), report.passes[-1]


def barriers(lowered: jax.stages.Lowered) -> list[Instruction]:
    module = HloModule.from_bytes(lowering.hlo_bytes(lowered))
    return [i for i in graph.walk(module.entry) if i.opcode == "opt-barrier"]


def strands(barrier: Instruction) -> list[str]:
    names = [value.op_name for value in barrier.operands[0].operands]
    return [s for name in names for s in (ALPHA, BETA) if name.startswith(s)]


@pytest.mark.parametrize("layer", [mlp, without_skip, jax.checkpoint(mlp)], ids=["mlp", "no skip", "remat"])
def test_strands_go_in_step_and_compute_the_same(layer: Callable[..., jax.Array]) -> None:
    plain, tied, report = transform(step(layer))
    assert report.changed
    together = [s for s in map(strands, barriers(tied)) if BETA in s]
    assert len(together) == report.notes[0].facts["barriers"] >= DEPTH - 1
    assert all(s.count(BETA) == 1 and s.count(ALPHA) >= 1 for s in together)
    expected, found = (jax.tree.leaves(lowered.compile()(*arguments())) for lowered in (plain, tied))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_layer_with_a_skip_has_one_cut() -> None:
    """A cut is at a value that alone carries the strand. Inside a layer, the skip connection bypasses the work. Nothing
    bypasses the work of the last layer.
    """
    _, tied, _ = transform(step(mlp))
    opcodes = [[v.opcode for v in b.operands[0].operands][:2] for b in barriers(tied)]
    assert opcodes == [["add", "add"]] * (DEPTH - 1) + [["tanh", "multiply"]]


@pytest.mark.parametrize("function", [step(mlp, scan=True), step(no_work)], ids=["scan", "no work"])
def test_left_alone(function: Callable[..., Any]) -> None:
    _, _, report = transform(function)
    assert report.outcome == UNCHANGED and not report.notes


def test_golden_barriers_between_the_layers_of_both_strands() -> None:
    report = golden.check(GOLDEN, StrandDuplication(), StrandLockstep())
    assert [note.facts for note in report.notes] == [{"barriers": 2}]


def test_golden_program_without_strands_is_left_alone() -> None:
    before, after, report = golden.run(golden.read(GOLDEN), StrandLockstep())
    assert after is before and report.outcome == UNCHANGED
