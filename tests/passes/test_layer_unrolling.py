"""Unrolled layer loops of both strands: the same bits, no slices left, and fewer copies in the compiled program."""

import jax
import jax.numpy as jnp
import pytest

from dhelix.benchmarks.structure import Case, lower
from dhelix.passes.activation_sharing import ActivationSharing
from dhelix.passes.costs import Costs
from dhelix.passes.gradient_accumulation import GradientAccumulation
from dhelix.passes.hlo import HloModule, Instruction, WhileLoop, graph, shapes
from dhelix.passes.layer_unrolling import LayerUnrolling
from dhelix.passes.manager import PassManager, Stage
from dhelix.passes.report import UNCHANGED, PassReport
from dhelix.passes.step_time import predict
from dhelix.passes.strand_duplication import ALPHA, BETA, StrandDuplication
from dhelix.profiles.hardware import H200
from dhelix.runtime import deviceless, lowering
from dhelix.tests.passes import test_generated_programs as generated
from dhelix.tests.passes.programs import Program

WIDTH, DEPTH = 8, 3
STRUCTURE = (StrandDuplication(), GradientAccumulation())


def step(dtype: jnp.dtype):
    """Micro-batches of scanned layers, whose weights are converted to `dtype` once per step."""

    def loss(layers: jax.Array, rows: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), rows.astype(dtype), layers)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def train_step(layers: jax.Array, batch: jax.Array):
        half = layers.astype(dtype)

        def micro_batch(total, rows):
            value, gradient = jax.value_and_grad(loss)(half, rows)
            return (total[0] + value, total[1] + gradient.astype(jnp.float32)), None

        return jax.lax.scan(micro_batch, (jnp.float32(0), jnp.zeros_like(layers)), batch)[0]

    return train_step


def transform(
    unrolling: LayerUnrolling, microbatches: int = 4, dtype: jnp.dtype = jnp.bfloat16
) -> tuple[HloModule, PassReport]:
    layers = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((microbatches, 2, WIDTH), jnp.float32)
    plain = jax.jit(step(dtype)).lower(layers, batch)
    manager = PassManager([*STRUCTURE, unrolling], strict=True)
    changed, report = manager.run(Stage.LOWERED, lowering.hlo_bytes(plain))
    assert changed is not None
    return HloModule.from_bytes(changed), report.passes[-1]


def strand_loops(module: HloModule) -> list[Instruction]:
    loops = [i for i in graph.walk(module.entry) if i.opcode == "while"]
    return [i for i in loops if any(s in j.op_name for j in graph.walk(i.called[0]) for s in (ALPHA, BETA))]


def test_one_loop_is_left_and_its_state_has_no_stack_of_residuals_or_weights() -> None:
    module, report = transform(LayerUnrolling())
    (loop,) = strand_loops(module)
    stacks = [s for s in loop.shape.tuple_shapes if s.dimensions[:1] == [DEPTH]]
    assert [shapes.type_name(s) for s in stacks] == ["f32"], "the sum of the gradients"
    body = loop.called[0].instructions
    assert all(i.operands[0].shape.element_type == shapes.F32 for i in body if i.opcode == "dynamic-slice")
    facts = report.notes[0].facts
    assert facts["layers"] == DEPTH and facts["arrays"] == DEPTH * facts["stacks"]


def test_strands_stay_in_step() -> None:
    """Between two layers there is a barrier that holds values of both strands."""
    module, _ = transform(LayerUnrolling())
    body = strand_loops(module)[0].called[0]
    barriers = [i for i in body.instructions if i.opcode == "opt-barrier"]
    both = [{s for s in (ALPHA, BETA) for v in b.operands[0].operands if v.op_name.startswith(s)} for b in barriers]
    assert both == [{ALPHA, BETA}] * (DEPTH - 1)


@pytest.mark.parametrize("microbatches, trips", [(2, None), (3, 1), (4, 1), (5, 2), (6, 2)])
def test_two_micro_batches_in_an_iteration(microbatches: int, trips: int | None) -> None:
    """What is left over of an odd number of iterations stands before the loop."""
    module, _ = transform(LayerUnrolling(pair_micro_batches=True), microbatches)
    assert [WhileLoop(i).trip_count for i in strand_loops(module)] == ([] if trips is None else [trips])


def test_weights_that_are_arguments_stay_stacked() -> None:
    """Slices of them would be a second copy of the weights, alive for the whole step."""
    module, _ = transform(LayerUnrolling(), dtype=jnp.float32)
    (loop,) = strand_loops(module)
    assert sum(s.dimensions[:1] == [DEPTH] for s in loop.shape.tuple_shapes) == 2


def test_too_many_layers_are_left_alone() -> None:
    _, report = transform(LayerUnrolling(most_layers=DEPTH - 1))
    assert report.outcome == UNCHANGED
    assert report.notes[0].message == "layers not unrolled: more than 2"


def test_activation_sharing_has_nothing_left_to_do() -> None:
    module, _ = transform(LayerUnrolling())
    assert PassManager([ActivationSharing()], strict=True).run(Stage.LOWERED, module.to_bytes())[0] is None


SAME_BITS = (
    Program(microbatches=2),
    Program(microbatches=3, dtype="bf16", tokens=True),
    Program(microbatches=4, layer="attention", remat="layer", constants=True),
    Program(microbatches=5, stack="backwards", layer="norm", accumulation="running_mean"),
    Program(microbatches=5, loop="countdown", stack="by_two", depth=4, carries=("momentum", "previous")),
    Program(microbatches=4, loop="optax_mean", stack="counted", dropout="seeds", half_parameters=True, dtype="bf16"),
    Program(microbatches=3, stack="buffered", metrics=("activations", "losses")),
    Program(microbatches=4, stack="groups", other_depth=2),
    Program(microbatches=4, stack="frozen", depth=3, other_depth=3),
    Program(stack="same_way", gradient="per_example"),  # indices with a dimension, of which a slot's is made
)


@pytest.mark.parametrize("program", SAME_BITS, ids=repr)
def test_the_same_bits(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = (*STRUCTURE, LayerUnrolling(pair_micro_batches=program.microbatches > 3), ActivationSharing())
    monkeypatch.setattr(generated, "manager", lambda *_: PassManager(passes))
    assert {"strand-duplication", "layer-unrolling"} <= generated.check(program).changed


@pytest.mark.slow
@pytest.mark.deviceless
def test_compiled_it_copies_less_and_needs_no_more_memory() -> None:
    """Llama-8B shapes on 4 H200s: every product once, as in the plain step, and fewer kernels than in its loops."""
    lowered = lower(Case("4 GPUs", layers=4, microbatches=6))
    changed, _ = PassManager([*STRUCTURE, LayerUnrolling()], strict=True).run(
        Stage.LOWERED, lowering.hlo_bytes(lowered)
    )
    assert changed is not None
    plain, unrolled = (deviceless.compile(one) for one in (lowered, lowering.with_hlo(lowered, changed)))
    before, after = (predict(lowering.compiled_module(one), Costs(H200)) for one in (plain, unrolled))
    products = [sum(o.count for o in time.operators if o.key.kind == "gemm") for time in (before, after)]
    assert products[0] == products[1]
    assert after.executions < 0.75 * before.executions
    used, needed = (one.memory_analysis() for one in (plain, unrolled))
    assert used is not None and needed is not None
    assert needed.peak_memory_in_bytes <= 1.03 * used.peak_memory_in_bytes
