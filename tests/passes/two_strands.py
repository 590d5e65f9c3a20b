"""Programs with two strands, for tests of their orders."""

import dataclasses

from hypothesis import strategies as st

from dhelix.passes.analysis.buffers import Memory
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import Limits
from dhelix.profiles.hardware import H200_NO_P2P
from dhelix.tests.passes.schedules import Done, Op, Program, Start, programs

FORWARD = [Op("f1", 1.0, ("p",)), Start("fg", 4.0, "f1"), Done("fg"), Op("f2", 4.0, ("fg_done",))]
BACKWARD = [Op("b1", 4.0, ("p",)), Start("bg", 4.0, "b1"), Done("bg"), Op("b2", 1.0, ("bg_done",))]
BOTH = [*FORWARD, *BACKWARD]

# A gather of one strand that could run under the product of the other.
PRODUCTS = """HloModule m, is_scheduled=true
gather {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true
}
ENTRY e {
  x = bf16[2048,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  y = bf16[8192,4096] parameter(2)
  start = ((bf16[2048,4096]), bf16[8192,4096]) async-start(x), calls=gather
  done = bf16[8192,4096] async-done(start)
  forward = bf16[8192,4096] dot(done, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  backward = bf16[8192,4096] dot(y, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (bf16[8192,4096], bf16[8192,4096]) tuple(forward, backward)
}"""  # noqa: E501

# Two gathers that can both run under one product, but not if only one may be in flight.
TOGETHER = """HloModule m, is_scheduled=true
gather {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=1, use_global_device_ids=true
}
other {
  q = bf16[2048,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, channel_id=2, use_global_device_ids=true
}
ENTRY e {
  p = bf16[2048,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  y = bf16[131072,4096] parameter(2)
  start = ((bf16[2048,4096]), bf16[8192,4096]) async-start(p), calls=gather
  start2 = ((bf16[2048,4096]), bf16[8192,4096]) async-start(p), calls=other
  x = bf16[131072,4096] dot(y, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  done = bf16[8192,4096] async-done(start)
  done2 = bf16[8192,4096] async-done(start2)
  ROOT result = (bf16[131072,4096], bf16[8192,4096], bf16[8192,4096]) tuple(x, done, done2)
}"""  # noqa: E501


def limits_of(module: HloModule, slack: float = 0.0) -> Limits:
    """Limits of a GPU without peer-to-peer, with a fraction `slack` more memory than the entry's peak."""
    memory = Memory(module)
    peak = memory.peak(module.entry, module.schedule[module.entry])
    return Limits(H200_NO_P2P, int(peak * (1.0 + slack)), memory)


@st.composite
def two_strands(draw: st.DrawFn) -> tuple[Program, list[str]]:
    """Two random programs, one after the other, and the results of both."""
    program, results = draw(programs())
    other, more = draw(programs())

    def named(value: str) -> str:
        return value if value == "p" else f"z{value}"

    for step in other:
        if isinstance(step, Op):
            program = [
                *program,
                dataclasses.replace(step, name=named(step.name), operands=(*map(named, step.operands),)),
            ]
        elif isinstance(step, Start):
            program = [*program, dataclasses.replace(step, name=named(step.name), operand=named(step.operand))]
        else:
            program = [*program, Done(named(step.start))]
    return program, list(dict.fromkeys([*results, *map(named, more)]))
