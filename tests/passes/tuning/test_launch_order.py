"""What NCCL is asked about while a program runs."""

from __future__ import annotations

from dhelix.passes.hlo import HloModule
from dhelix.passes.tuning.launch_order import sequences

PROGRAM = """
HloModule step, is_scheduled=true, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

body {
  state = (s32[], f32[64]) parameter(0)
  n = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(n, one)
  x = f32[64] get-tuple-element(state), index=1
  gathered = f32[128] all-gather(x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true
  back = f32[64] reduce-scatter(gathered), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}, use_global_device_ids=true, to_apply=add
  ROOT result = (s32[], f32[64]) tuple(next, back)
}

condition {
  state = (s32[], f32[64]) parameter(0)
  n = s32[] get-tuple-element(state), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(n, three), direction=LT
}

ENTRY main {
  zero = s32[] constant(0)
  x = f32[64] parameter(0)
  tiny = f32[] parameter(1)
  big = f32[4096] parameter(2)
  half = bf16[64] parameter(3)
  alone = f32[64] all-gather(x), channel_id=5, replica_groups={{0},{1},{2},{3}}, dimensions={0}, use_global_device_ids=true
  moved = f32[64] collective-permute(alone), channel_id=6, source_target_pairs={{0,1},{1,0}}
  init = (s32[], f32[64]) tuple(zero, moved)
  loop = (s32[], f32[64]) while(init), condition=condition, body=body, backend_config={"known_trip_count":{"n":"3"}}
  y = f32[64] get-tuple-element(loop), index=1
  several = (f32[64], f32[], f32[4096], f32[64], bf16[64]) all-reduce(y, tiny, big, x, half), channel_id=3, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=add
  ROOT out = f32[64] get-tuple-element(several), index=0
}
"""  # noqa: E501


def test_loops_are_unrolled_and_groups_are_apart() -> None:
    found = sequences(HloModule.from_text(PROGRAM))
    pairs, all_four = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    asked = {key: [(one.kind, one.bytes) for one in each] for key, each in found.items()}
    assert asked[pairs, None] == [("all-gather", 512), ("reduce-scatter", 512)] * 3
    # Sizes within a factor of 4 are asked about together, types apart, and a collective on one device not at all.
    assert asked[all_four, None] == [("all-reduce", 4), ("all-reduce", 512), ("all-reduce", 16384), ("all-reduce", 128)]
    assert set(asked) == {(pairs, None), (all_four, None)}
    assert {one.instruction.name for one in found[all_four, None]} == {"several"}


def test_the_type_of_the_largest_buffer_is_asked_about_first() -> None:
    text = PROGRAM.replace("all-reduce(y, tiny, big, x, half)", "all-reduce(half, tiny, big, x, y)")
    text = text.replace("(f32[64], f32[], f32[4096], f32[64], bf16", "(bf16[64], f32[], f32[4096], f32[64], f32")
    text = text.replace("get-tuple-element(several), index=0", "get-tuple-element(several), index=4")
    found = sequences(HloModule.from_text(text))[((0, 1, 2, 3),), None]
    assert [one.bytes for one in found] == [4, 512, 16384, 128]
