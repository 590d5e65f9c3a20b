"""Bytes, kinds and device groups of collectives, in all spellings that XLA has printed since 2022."""

import pytest

from dhelix.passes.analysis.collectives import Collective, find_collective, named_mesh
from dhelix.passes.hlo import HloModule, Instruction

ADD = """add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
"""
GROUPS = "replica_groups=[2,4]<=[8], channel_id=1, use_global_device_ids=true"
EIGHT = ((0, 1, 2, 3), (4, 5, 6, 7))


def entry(body: str, header: str = "num_partitions=8", before: str = "") -> list[Instruction]:
    """Instructions of a module whose entry begins with p: f32[1024] (4 KiB), q: f32[64] (256 B), i: s32[4]."""
    lines = ["p = f32[1024] parameter(0)", "q = f32[64] parameter(1)", "i = s32[4] parameter(2)", *body.splitlines()]
    lines[-1] = f"ROOT {lines[-1].strip()}"
    program = "\n".join(["ENTRY main {", *lines, "}"])
    return HloModule.from_text(f"HloModule m, {header}\n\n{ADD}\n{before}\n{program}\n").entry.instructions


def collective(body: str, header: str = "num_partitions=8", before: str = "") -> Collective:
    (found,) = filter(None, map(find_collective, entry(body, header, before)))
    return found


GATHER = f"all-gather(p), dimensions={{0}}, {GROUPS}"
PLAIN = [
    (f"r = f32[1024] all-reduce(p), to_apply=add, {GROUPS}", "all-reduce", 4096),
    (f"r = (f32[1024], f32[64]) all-reduce(p, q), to_apply=add, {GROUPS}", "all-reduce", 4352),
    (f"r = f32[1024] all-reduce-start(p), to_apply=add, {GROUPS}", "all-reduce", 4096),
    (f"r = (f32[1024], f32[64]) all-reduce-start(p, q), to_apply=add, {GROUPS}", "all-reduce", 4352),
    (f"r = (f32[64], f32[1024]) all-reduce-start(q, p), to_apply=add, {GROUPS}", "all-reduce", 4352),
    (f"r = f32[4096] {GATHER}", "all-gather", 16384),
    (f"r = (f32[1024], f32[4096]) {GATHER.replace('(', '-start(', 1)}", "all-gather", 16384),
    (
        "r = ((f32[1024], f32[64]), (f32[4096], f32[256])) all-gather-start(p, q), dimensions={0}, " + GROUPS,
        "all-gather",
        17408,
    ),
    (f"r = f32[256] reduce-scatter(p), dimensions={{0}}, to_apply=add, {GROUPS}", "reduce-scatter", 4096),
    (f"r = f32[1024] all-to-all(p), dimensions={{0}}, {GROUPS.rpartition(',')[0]}", "all-to-all", 4096),
    (
        f"r = (f32[64], f32[64], f32[64], f32[64]) all-to-all(q, q, q, q), {GROUPS.rpartition(',')[0]}",
        "all-to-all",
        1024,
    ),
    (f"r = f32[64] collective-broadcast(q), {GROUPS.rpartition(',')[0]}", "collective-broadcast", 256),
    (
        f"r = f32[1024] ragged-all-to-all(q, p, i, i, i, i), {GROUPS.rpartition(',')[0]}",
        "ragged-all-to-all",
        256,
    ),
]


@pytest.mark.parametrize(("line", "kind", "size"), PLAIN)
def test_bytes_are_those_of_all_operands(line: str, kind: str, size: int) -> None:
    assert collective(line) == Collective(kind, size, EIGHT)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("r = f32[1024] collective-permute(p), channel_id=1, source_target_pairs={{0,1},{1,2}}", 4096),
        (
            "r = (f32[1024], f32[1024]) collective-permute-start(p), channel_id=1, source_target_pairs={{0,1},{1,2}}",
            4096,
        ),
        (
            "r = (f32[1024], f32[1024], u32[], u32[]) collective-permute-start(p), channel_id=1, "
            "source_target_pairs={{0,1},{1,2}}",
            4096,
        ),
        (
            "r = ((f32[1024], f32[64]), (f32[1024], f32[64])) collective-permute-start(p, q), channel_id=1, "
            "source_target_pairs={{0,1},{1,2}}",
            4352,
        ),
    ],
)
def test_contexts_of_a_permute_are_no_bytes(line: str, size: int) -> None:
    assert collective(line) == Collective("collective-permute", size, ((0, 1), (1, 2)))


def wrapped(*lines: str) -> str:
    return "\n".join(["wrapped {", "p = f32[1024] parameter(0)", "q = f32[64] parameter(1)", *lines, "}\n"])


START = "r = ((f32[1024], f32[64]), TYPE, u32[]) async-start(p, q), calls=wrapped"


def test_an_async_pair_counts_what_it_wraps() -> None:
    inside = wrapped(
        "unused = f32[64] negate(q)", f"ROOT s = f32[256] reduce-scatter(p), dimensions={{0}}, to_apply=add, {GROUPS}"
    )
    found = collective(START.replace("TYPE", "f32[256]"), before=inside)
    assert found == Collective("reduce-scatter", 4096, EIGHT)


def test_collectives_of_one_kind_that_begin_together_are_one() -> None:
    inside = wrapped(
        f"a = f32[1024] all-reduce(p), to_apply=add, {GROUPS}",
        f"b = f32[64] all-reduce(q), to_apply=add, {GROUPS.replace('channel_id=1', 'channel_id=2')}",
        "ROOT t = (f32[1024], f32[64]) tuple(a, b)",
    )
    found = collective(START.replace("TYPE", "(f32[1024], f32[64])"), before=inside)
    assert found == Collective("all-reduce", 4352, EIGHT)


def test_collectives_of_several_kinds_that_begin_together_all_count() -> None:
    inside = wrapped(
        f"a = f32[1024] all-reduce(p), to_apply=add, {GROUPS}",
        f"b = f32[256] all-gather(q), dimensions={{0}}, {GROUPS}",
        "ROOT t = (f32[1024], f32[256]) tuple(a, b)",
    )
    found = collective(START.replace("TYPE", "(f32[1024], f32[256])"), before=inside)
    other = Collective("all-gather", 1024, EIGHT)
    assert found == Collective("all-reduce", 4096, EIGHT, (other,))


def test_a_fused_collective_counts() -> None:
    inside = wrapped(f"a = f32[1024] all-reduce(p), to_apply=add, {GROUPS}", "ROOT n = f32[1024] negate(a)")
    found = collective("r = f32[1024] fusion(p, q), kind=kCustom, calls=wrapped", before=inside)
    assert found == Collective("all-reduce", 4096, EIGHT)


BOTH = "replica_count=2, num_partitions=4"


@pytest.mark.parametrize(
    ("attributes", "header", "groups"),
    [
        # Groups of devices, in all forms of lists.
        (f"replica_groups={{{{0,2}},{{1,3}}}}, {GROUPS.partition(', ')[2]}", "num_partitions=4", ((0, 2), (1, 3))),
        (f"replica_groups=[2,2]<=[4], {GROUPS.partition(', ')[2]}", "num_partitions=4", ((0, 1), (2, 3))),
        (f"replica_groups=[2,2]<=[2,2]T(1,0), {GROUPS.partition(', ')[2]}", "num_partitions=4", ((0, 2), (1, 3))),
        (f"replica_groups={{}}, {GROUPS.partition(', ')[2]}", "num_partitions=4", ((0, 1, 2, 3),)),
        (f"replica_groups={{}}, {GROUPS.partition(', ')[2]}", BOTH, (tuple(range(8)),)),
        # Groups of replicas; each partition communicates only with the same partition of other replicas.
        ("replica_groups={}", "replica_count=4", ((0, 1, 2, 3),)),
        ("replica_groups={{0,1}}", BOTH, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups={}", BOTH, ((0, 4), (1, 5), (2, 6), (3, 7))),
        # Groups of replicas with all of their partitions.
        ("replica_groups={{0},{1}}, channel_id=1", BOTH, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups={}, channel_id=1", "num_partitions=64", (tuple(range(64)),)),
        # The module does not give the number of devices, or the numbers exceed its replicas.
        ("replica_groups={{0,1},{2,3}}", "is_scheduled=true", ((0, 1), (2, 3))),
        ("replica_groups={}", "is_scheduled=true", ()),
        ("replica_groups={{0,1},{2,3}}", "num_partitions=4", ((0, 1), (2, 3))),
    ],
)
def test_groups_are_of_devices(attributes: str, header: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert collective(f"r = f32[1024] all-reduce(p), to_apply=add, {attributes}", header).groups == groups


def test_partitions_of_each_replica_exchange_apart() -> None:
    line = "r = f32[1024] collective-permute(p), channel_id=1, source_target_pairs={{0,1}}"
    assert collective(line, BOTH).groups == ((0, 1), (4, 5))
    assert collective(line.replace("channel_id=1, ", ""), BOTH).groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_the_devices_that_a_text_names_stay_known_in_a_copy() -> None:
    module = HloModule.from_text("HloModule m, num_partitions=64\n\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\n")
    assert module.device_counts == module.clone().device_counts == (1, 64)
    assert HloModule.from_text(module.to_text()).device_counts == (0, 0)  # the serialized form does not hold the counts


MESH = "mesh['dp'=2,'cp'=2,'tp'=2,'one'=1]"
IDS = "channel_id=1, use_global_device_ids=true"
NAMED = f"n = f32[64] all-reduce(q), to_apply=add, replica_groups={MESH} {{'dp','one'}}, {IDS}"


@pytest.mark.parametrize(
    ("found", "axes"),
    [
        (f"all-reduce(p), to_apply=add, replica_groups={MESH} {{'cp'}}, {IDS}", ("cp",)),
        (f"all-reduce(p), to_apply=add, replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, {IDS}", ("tp",)),
        (f"all-reduce(p), to_apply=add, replica_groups=[2,4]<=[2,2,2]T(1,0,2), {IDS}", ("dp", "tp")),
        (f"all-reduce(p), to_apply=add, replica_groups=[1,8]<=[8], {IDS}", ("dp", "cp", "tp")),
        (f"all-reduce(p), to_apply=add, replica_groups={{{{0,3}},{{1,2}},{{4,7}},{{5,6}}}}, {IDS}", ()),
        (f"all-reduce(p), to_apply=add, replica_groups=[8,1]<=[8], {IDS}", ()),
        ("collective-permute(p), source_target_pairs={{0,2},{2,0},{4,6}}, channel_id=1", ("cp",)),
    ],
)
def test_groups_run_over_axes_of_the_named_mesh(found: str, axes: tuple[str, ...]) -> None:
    named, one = entry(f"{NAMED}\nr = f32[1024] {found}")[-2:]
    mesh = named_mesh(named.computation.module)
    collective = find_collective(one)
    assert mesh and collective and mesh.over(collective) == axes


def test_a_program_without_one_named_mesh_has_no_axes() -> None:
    (*_, other) = entry(f"r = f32[1024] all-reduce(p), to_apply=add, {GROUPS}")
    assert named_mesh(other.computation.module) is None
    (*_, other) = entry(f"{NAMED}\nr = f32[64] all-reduce(q), to_apply=add, replica_groups=mesh['x'=8] {{'x'}}, {IDS}")
    assert named_mesh(other.computation.module) is None
