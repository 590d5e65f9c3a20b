"""Values that are proved to be equal on several devices of a partitioned program, and values that are not."""

import pytest

from dhelix.passes.analysis.collectives import Groups
from dhelix.passes.analysis.replication import Replication
from dhelix.passes.hlo import HloModule, Instruction

ALL, PAIRS, ACROSS = ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))
HEAD = "use_global_device_ids=true, to_apply=add, channel_id=1"
TEXT = """HloModule m
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b) }
body {
  state = (s32[], f32[4,2], f32[2], f32[2], f32[2]) parameter(0)
  l = s32[] get-tuple-element(state), index=0
  kept = f32[4,2] get-tuple-element(state), index=1
  grown = f32[2] get-tuple-element(state), index=2
  mixed = f32[2] get-tuple-element(state), index=3
  swapped = f32[2] get-tuple-element(state), index=4
  one = s32[] constant(1)
  next = s32[] add(l, one)
  zero = s32[] constant(0)
  slice = f32[1,2] dynamic-slice(kept, l, zero), dynamic_slice_sizes={1,2}
  row = f32[2] reshape(slice)
  more = f32[2] add(grown, row)
  different = f32[2] multiply(mixed, swapped)
  ROOT r = (s32[], f32[4,2], f32[2], f32[2], f32[2]) tuple(next, kept, more, different, swapped)
}
condition {
  state = (s32[], f32[4,2], f32[2], f32[2], f32[2]) parameter(0)
  l = s32[] get-tuple-element(state), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(l, n), direction=LT
}
ENTRY e {
  whole = f32[4,2] parameter(0), sharding={replicated}
  part = f32[2] parameter(1), sharding={devices=[4]<=[4]}
  unsaid = f32[2] parameter(2)
  start = s32[] constant(0)
  zeros = f32[2] constant({0, 0})
  state = (s32[], f32[4,2], f32[2], f32[2], f32[2]) tuple(start, whole, zeros, zeros, part)
  loop = (s32[], f32[4,2], f32[2], f32[2], f32[2]) while(state), condition=condition, body=body
  out = f32[2] get-tuple-element(loop), index=2
  out_mixed = f32[2] get-tuple-element(loop), index=3
  fence = (f32[4,2], f32[2]) tuple(whole, part)
  fenced = (f32[4,2], f32[2]) opt-barrier(fence)
  behind = f32[4,2] get-tuple-element(fenced), index=0
  device = u32[] partition-id()
  summed = f32[2] all-reduce(part), HEAD, replica_groups={{0,1},{2,3}}
  everywhere = f32[2] all-reduce(part), HEAD, replica_groups={{0,1,2,3}}
  over_replicas = f32[2] all-reduce(part), to_apply=add, replica_groups={{0}}
  half = f32[2] tanh(summed)
  called = f32[2] custom-call(zeros), custom_call_target="unknown"
  ROOT r = (f32[2], f32[2], f32[4,2], u32[], f32[2], f32[2], f32[2], f32[2], f32[2]) tuple(out, out_mixed, behind,
    device, half, everywhere, called, unsaid, over_replicas)
}""".replace("HEAD", HEAD)


@pytest.fixture(scope="module")
def module() -> HloModule:
    return HloModule.from_text(TEXT)


def named(module: HloModule, name: str) -> Instruction:
    return next(i for c in module.computations for i in c.instructions if i.name == name)


@pytest.mark.parametrize(
    ("name", "groups", "same"),
    [
        ("whole", ALL, True),
        ("part", ALL, False),
        ("part", PAIRS, False),
        ("unsaid", ALL, False),
        ("zeros", ALL, True),
        ("device", ALL, False),
        ("called", ALL, False),
        ("behind", ALL, True),
        ("kept", ALL, True),
        ("row", ALL, True),
        ("more", ALL, True),
        ("swapped", ALL, False),
        ("mixed", ALL, False),
        ("out", ALL, True),
        ("out_mixed", ALL, False),
        ("half", PAIRS, True),
        ("half", ACROSS, False),
        ("half", ALL, False),
        ("everywhere", PAIRS, True),
        ("everywhere", ((0, 7),), False),
        ("everywhere", ((6, 7),), False),
        ("over_replicas", ALL, False),
        ("whole", (), True),
        ("everywhere", (), False),
    ],
)
def test_what_is_the_same(module: HloModule, name: str, groups: Groups, same: bool) -> None:
    assert Replication(module).same_on(groups, named(module, name)) is same


def test_all_of_several_values_must_be_the_same(module: HloModule) -> None:
    replication = Replication(module)
    assert replication.same_on(ALL)
    assert replication.same_on(ALL, named(module, "whole"), named(module, "out"))
    assert not replication.same_on(ALL, named(module, "whole"), named(module, "part"))


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ("{{0,2},{1,3}}", True),
        ("{{2,0},{3,1}}", True),
        ("{{0,3},{1,2}}", True),
        ("{{0,3},{2,1}}", False),
        ("{{0,2},{3,1}}", False),
        ("{{0,2}}", False),
        ("{{0,6},{1,7}}", False),
    ],
)
def test_a_collective_over_another_axis_keeps_it_so(theirs: str, same: bool) -> None:
    """Devices of a pair hold equal values. A gather keeps them equal if both devices gather in the same order."""
    text = """HloModule m
ENTRY e {
  x = f32[2] parameter(0)
  ROOT g = f32[4] all-gather(x), dimensions={0}, channel_id=1, use_global_device_ids=true, replica_groups=GROUPS
}"""
    module = HloModule.from_text(text.replace("GROUPS", theirs))
    sharding = named(module, "x").proto.sharding.named_sharding
    for name in ("a", "b"):
        sharding.mesh.axes.add(name=name, size=2)
    sharding.dim_shardings.add(is_closed=True).axes.add(mesh_axis_index=0)
    assert Replication(module).same_on(PAIRS, named(module, "g")) is same


@pytest.mark.parametrize(
    ("axes", "groups", "same"),
    [
        ([], ALL, True),
        ([0], PAIRS, True),
        ([0], ACROSS, False),
        ([1], PAIRS, False),
        ([1], ACROSS, True),
        ([0, 1], PAIRS, False),
    ],
)
def test_a_parameter_is_the_same_where_its_sharding_says_so(axes: list[int], groups: Groups, same: bool) -> None:
    """The devices form a mesh of 2 x 2: 0 and 1 differ in the second axis, and so do 2 and 3."""
    module = HloModule.from_text(TEXT)
    parameter = named(module, "unsaid")
    sharding = parameter.proto.sharding.named_sharding
    for name in ("a", "b"):
        sharding.mesh.axes.add(name=name, size=2)
    dimension = sharding.dim_shardings.add(is_closed=True)
    for axis in axes:
        dimension.axes.add(mesh_axis_index=axis)
    assert Replication(module).same_on(groups, parameter) is same


def test_a_loop_of_unknown_length_hands_on_nothing_that_it_changes() -> None:
    """Devices may leave the loop after different iterations, so its results are not proved to be equal. Inside, all
    devices are in the same iteration, because their collectives would hang otherwise.
    """
    module = HloModule.from_text(
        TEXT.replace("n = s32[] constant(4)", "d = u32[] partition-id()\n n = s32[] convert(d)")
    )
    replication = Replication(module)
    assert replication.same_on(ALL, named(module, "more"))
    assert not replication.same_on(ALL, named(module, "out"))
