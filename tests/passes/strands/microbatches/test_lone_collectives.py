"""Collectives of groups of one device are replaced by their operands."""

from dhelix.passes.hlo import HloModule, verify
from dhelix.passes.strands.microbatches.lone_collectives import drop_lone_collectives

TEXT = """HloModule m, num_partitions=2
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b) }
ENTRY main { x = f32[8] parameter(0)
  alone = f32[8] all-reduce(x), channel_id=1, replica_groups={{0},{1}}, use_global_device_ids=true, to_apply=add
  again = f32[8] all-gather(alone), channel_id=2, replica_groups={{0},{1}}, dimensions={0}, use_global_device_ids=true
  both = f32[8] all-reduce(again), channel_id=3, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
  all = f32[8] all-reduce(x), channel_id=4, replica_groups={}, use_global_device_ids=true, to_apply=add
  apart = f32[8] all-reduce(x), channel_id=5, replica_groups={{0}}, to_apply=add
  ROOT y = (f32[8], f32[8], f32[8]) tuple(both, all, apart) }
"""


def test_what_several_devices_do_stays() -> None:
    module = HloModule.from_text(TEXT)
    assert drop_lone_collectives(module) == 2
    verify(module)
    (x,) = module.entry.parameters
    left = module.entry.root.operands  # the last one is over a replica with all of its partitions
    assert [i.opcode for i in left] == ["all-reduce"] * 3 and all(i.operands == [x] for i in left)
    assert drop_lone_collectives(module) == 0
