"""A baseline order that hides reductions beside weight gradients, and nothing else."""

from hypothesis import given, settings

from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify_sequence
from dhelix.passes.simulation.megatron_order import megatron_order
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.schedules import Program, build, programs, runs_rightly
from dhelix.tests.passes.two_strands import limits_of

# Backward of a column-parallel layer (x, its reduction, wx) behind that of a row-parallel one (gather, y, wy).
BACKWARD = """HloModule m, is_scheduled=true
gather {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true
}
add {
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT s = bf16[] add(a, b)
}
scatter {
  q = bf16[8192,4096] parameter(0)
  ROOT g = bf16[2048,4096] reduce-scatter(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=2, use_global_device_ids=true, to_apply=add
}
ENTRY e {
  d = bf16[2048,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  kept = bf16[8192,4096] parameter(2)
  gathering = ((bf16[2048,4096]), bf16[8192,4096]) async-start(d), calls=gather
  gathered = bf16[8192,4096] async-done(gathering)
  y = bf16[8192,4096] dot(gathered, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  x = bf16[8192,4096] dot(y, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wx = bf16[4096,4096] dot(kept, y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  scattering = ((bf16[8192,4096]), bf16[2048,4096]) async-start(x), calls=scatter
  scattered = bf16[2048,4096] async-done(scattering)
  z = bf16[2048,4096] dot(scattered, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wy = bf16[4096,4096] dot(kept, gathered), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT result = (bf16[2048,4096], bf16[4096,4096], bf16[4096,4096]) tuple(z, wx, wy)
}"""  # noqa: E501

IN_TURN = ("gathering", "gathered", "y", "x", "z")


def test_weight_gradients_of_column_parallel_layers_run_beside_their_reduction() -> None:
    module = HloModule.from_text(BACKWARD)
    costs = Costs(H200_NO_P2P)
    order = megatron_order(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    names = [i.name for i in order]
    assert names.index("scattering") < names.index("wx") < names.index("scattered")
    assert names.index("wy") < names.index("scattering")
    assert [n for n in names if n in IN_TURN] == list(IN_TURN)


@settings(deadline=None, max_examples=40)
@given(programs())
def test_the_order_is_legal(drawn: tuple[Program, list[str]]) -> None:
    program, results = drawn
    module, costs = build(program, results)
    order = megatron_order(module.entry, module.schedule[module.entry], costs, limits_of(module, 1.0))
    verify_sequence(module.entry, order)
    assert runs_rightly(program, order)
