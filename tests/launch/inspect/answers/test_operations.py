"""Where the compute time of a step goes, and how well the GPU is used."""

import pytest

from dhelix.launch.inspect.answers import operations as ops
from dhelix.launch.shown.instruction_words import Words
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.hlo import HloModule
from dhelix.profiles.hardware import ALL

H200 = ALL["H200"]
TEXT = """
HloModule jit_step, is_scheduled=true

ENTRY main {
  x = f32[64,64] parameter(0)
  a = f32[64,64] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp/dot_general"}
  b = f32[64,64] dot(x, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp/dot_general"}
  c = f32[64,64] dot(x, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp)/rematted_computation/dot_general"}
  d = f32[64,64] copy(c)
  s = f32[128,64] all-gather(d), dimensions={0}, replica_groups={{0,1}}
  ROOT e = f32[64,64] tanh(d), metadata={op_name="jit(step)/tanh"}
}
"""  # noqa: E501 (HLO)


def found() -> tuple[ops.Operation, ...]:
    """The operations of a step in which each product takes 2 ms, the collective 9 ms, and all else 1 ms."""
    module = HloModule.from_text(TEXT)
    ran = []
    for instruction in module.schedule[module.entry]:
        if instruction.opcode != "parameter":
            product = instruction.opcode == "dot"
            cost = Cost(0.0, flops=1e12 if product else 0.0, bytes=2.4e9)
            ran.append((instruction, 2.0, {"dot": 4.0, "all-gather": 18.0}.get(instruction.opcode, 2.0), cost))
    return ops.operations(ran, H200, Words())


def test_equal_operations_are_one_row() -> None:
    first, again, *rest = found()
    assert (first.what, first.instructions, first.executions, first.ms, first.example) == ("GEMM", 2, 4, 8.0, "a")
    assert (again.what, again.recomputed, again.ms) == ("GEMM", True, 4.0)
    assert sorted(one.what for one in rest) == ["copy", "tanh"]  # the collective does not compute
    assert first.tflops == pytest.approx(4e12 / 8e-3 / 1e12)
    assert first.roofline == pytest.approx(4 * max(1e12 / H200.peak_flops, 2.4e9 / H200.memory_bandwidth) / 8e-3)


def test_categories_add_up() -> None:
    sums = ops.categories(found())
    assert {name: one.ms for name, one in sums.items()} == {
        ops.PRODUCTS: 12.0,
        ops.MOVES: 2.0,
        ops.OTHERS: 2.0,
    }
    assert sum(one.flops for one in sums.values()) == 6e12


def test_what_is_computed_again_counts_only_in_hfu() -> None:
    used = ops.utilization(found(), H200, step_ms=10.0)
    assert used.hfu == pytest.approx(6e12 / (H200.peak_flops * 10e-3))
    assert used.mfu == pytest.approx(used.hfu * 4 / 6)


def test_without_a_gpu_there_is_no_roofline() -> None:
    (one,) = ops.operations([(HloModule.from_text(TEXT).entry.root, 1.0, 1.0, Cost(0.0))], None, Words())
    assert one.roofline is None
    assert ops.categories([one, one])[ops.OTHERS].best_ms is None
