"""A small scheduled step as text: a few long operators, a short one, collectives, and one that is refused."""

from __future__ import annotations

from functools import partial

from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.replay.operators import Operator, find_operators
from dhelix.passes.hlo import HloModule
from dhelix.profiles.keys import Key

_PRODUCT = (
    '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)

_STEP = """
HloModule jit_step, is_scheduled=true, num_partitions=4

add {
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT sum = bf16[] add(a, b)
}

doubled {
  p = bf16[ROWS,WIDTH] parameter(0)
  ROOT twice = bf16[ROWS,WIDTH] add(p, p)
}

tiny {
  p.1 = f32[16] parameter(0)
  ROOT negative = f32[16] negate(p.1)
}

around_gather {
  shard = bf16[QUARTER,WIDTH] parameter(0)
  ROOT gather.inside = bf16[ROWS,WIDTH] all-gather(shard), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0},
    use_global_device_ids=true
}

around_doubled {
  p.2 = bf16[ROWS,WIDTH] parameter(0)
  ROOT doubled.inside = bf16[ROWS,WIDTH] fusion(p.2), kind=kLoop, calls=doubled
}

ENTRY main {
  x = bf16[ROWS,WIDTH] parameter(0)
  w = bf16[WIDTH,WIDTH] parameter(1)
  shard.1 = bf16[QUARTER,WIDTH] parameter(2)
  few = f32[16] parameter(3)
  gather-start = ((bf16[QUARTER,WIDTH]), bf16[ROWS,WIDTH]) async-start(shard.1), calls=around_gather
  gemm = (bf16[ROWS,WIDTH], s8[33554432]) custom-call(x, w), custom_call_target="__cublas$lt$matmul",
    backend_config=PRODUCT
  gather-done = bf16[ROWS,WIDTH] async-done(gather-start)
  product = bf16[ROWS,WIDTH] get-tuple-element(gemm), index=0
  fusion-start = ((bf16[ROWS,WIDTH]), bf16[ROWS,WIDTH], u32[]) async-start(product), calls=around_doubled
  fusion-done = bf16[ROWS,WIDTH] async-done(fusion-start)
  small = f32[16] fusion(few), kind=kLoop, calls=tiny
  moved = bf16[ROWS,WIDTH] copy(fusion-done)
  scatter = bf16[HALF,WIDTH] reduce-scatter(moved), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0},
    use_global_device_ids=true, to_apply=add
  ready = token[] after-all()
  sent = (f32[16], u32[], token[]) send(small, ready), channel_id=3
  sent.done = token[] send-done(sent), channel_id=3
  ROOT result = (bf16[HALF,WIDTH], bf16[ROWS,WIDTH]) tuple(scatter, gather-done)
}
"""

NAMES = ("gather", "gemm", "doubled", "small", "moved", "scatter")
"""Names of the step's operators, in order."""
LONG = ("gather", "gemm", "doubled", "moved", "scatter")

keys = partial(key_of, gpus_per_node=4)


def module(rows: int = 8192, width: int = 4096) -> HloModule:
    """The step. With these sizes all operators but `small` take over 20 us on an H200; `sent` cannot be isolated."""
    sizes = {"ROWS": rows, "HALF": rows // 2, "QUARTER": rows // 4, "WIDTH": width, "PRODUCT": _PRODUCT}
    text = _STEP
    for name, value in sizes.items():
        text = text.replace(name, str(value))
    return HloModule.from_text(text)


def operators(rows: int = 8192, width: int = 4096) -> dict[str, Operator]:
    """The step's operators by name."""
    found, _ = find_operators(module(rows, width), keys)
    return dict(zip(NAMES, found, strict=True))


def key(name: str) -> Key:
    return operators()[name].key
