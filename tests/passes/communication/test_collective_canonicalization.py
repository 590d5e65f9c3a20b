"""Collectives of the partitioner in the form that a shard_map has: golden, on CPU devices, and cases left alone."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dhelix.passes.communication import collective_canonicalization as canonical
from dhelix.passes.communication.collective_canonicalization import CollectiveCanonicalization
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.hlo import Builder, HloModule
from dhelix.tests.passes import golden, partitioned

FORWARD, BACKWARD = (f"collective_canonicalization/{name}_layer.hlo" for name in ("forward", "backward"))
GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
FUNCTIONS = """
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b) }
maximum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] maximum(a, b) }
"""


def module(lines: str) -> HloModule:
    """An entry of these lines, in which GROUPS stands for one group of four devices."""
    return HloModule.from_text(f"HloModule m\n{FUNCTIONS}\nENTRY e {{\n{lines.replace('GROUPS', GROUPS)}\n}}")


def run(given: HloModule) -> tuple[HloModule, list[str]]:
    """The module after the pass, the same object if unchanged, and the pass's notes."""
    source = given.to_bytes()
    changed, report = PassManager((CollectiveCanonicalization(),), strict=True).run(Stage.PRE_SCHEDULER, source)
    return given if changed is None else HloModule.from_bytes(changed), [str(n) for n in report.passes[0].notes]


def opcodes(given: HloModule) -> list[str]:
    return [i.opcode for i in given.entry.instructions]


@pytest.mark.parametrize(("name", "devices", "made"), [(FORWARD, 8, 2), (BACKWARD, 4, 1)])
def test_golden(name: str, devices: int, made: int) -> None:
    """Before and after, the devices compute the same whole numbers, so the order of additions does not matter."""
    before = HloModule.from_text(golden.read(name))
    after, notes = run(HloModule.from_text(golden.read(name)))
    golden.filecheck(golden.printed(after), name)
    assert len(notes) == made and not any("left alone" in note for note in notes)
    arguments = partitioned.whole_numbers(before, devices)
    for old, new in zip(partitioned.execute(before, arguments), partitioned.execute(after, arguments), strict=True):
        np.testing.assert_array_equal(old, new)


def test_it_runs_once() -> None:
    after, _ = run(HloModule.from_text(golden.read(FORWARD)))
    assert run(after) == (after, [])


def test_equal_input_gives_equal_bytes() -> None:
    source = HloModule.from_text(golden.read(FORWARD)).to_bytes()
    manager = PassManager((CollectiveCanonicalization(),))
    first, second = (manager.run(Stage.PRE_SCHEDULER, source)[0] for _ in range(2))
    assert first == second and first is not None


def test_a_scheduled_module_is_left_alone() -> None:
    text = golden.read(BACKWARD).replace("HloModule step,", "HloModule step, is_scheduled=true,")
    context = PassContext()
    assert not CollectiveCanonicalization().run(HloModule.from_text(text), context)
    assert str(context.notes[0]) == "left alone: the module is scheduled"


# all-gather -> elementwise

GATHERED = """x = f32[2,8] parameter(0)
  w = f32[8,4] parameter(1)
  s = f32[8] parameter(2), sharding={replicated}
  r = f32[8,8] broadcast(s), dimensions={1}
  g = f32[8,8] all-gather(x), dimensions={0}, GROUPS
"""
SCALED = GATHERED + "m = f32[8,8] multiply(g, r)\n"
PRODUCT = "ROOT y = f32[8,4] dot(m, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
LATE = {
    "multiplied": SCALED + PRODUCT,
    "several operations": GATHERED + "c = f32[8,8] tanh(g)\n d = f32[8,8] subtract(r, c)\n m = f32[8,8] maximum(d, r)\n"
    + PRODUCT,
    "with itself": GATHERED + "m = f32[8,8] multiply(g, g)\n" + PRODUCT,
    "with scalars": GATHERED + "k = f32[] constant(1)\n m = f32[8,8] clamp(k, g, k)\n" + PRODUCT,
    "moved before the product": SCALED + "t = f32[8,8] transpose(m), dimensions={1,0}\n "
    "ROOT y = f32[8,4] dot(t, w), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    "the result is read by others too": SCALED + PRODUCT.replace("ROOT ", "")
    + "\n t = f32[8,8] tanh(m)\n ROOT p = (f32[8,4], f32[8,8]) tuple(y, t)",
}  # fmt: skip
WIDE = """x = bf16[2,8] parameter(0)
  w = f32[8,4] parameter(1)
  g = bf16[8,8] all-gather(x), dimensions={0}, GROUPS
  m = f32[8,8] convert(g)
"""
LEFT = {
    "something else reads the gathered array": (SCALED + PRODUCT.replace("ROOT ", "")
        + "\n t = f32[8,8] tanh(g)\n ROOT p = (f32[8,4], f32[8,8]) tuple(y, t)", None),
    "it is a result": (SCALED + PRODUCT.replace("ROOT ", "") + "\n ROOT p = (f32[8,4], f32[8,8]) tuple(y, g)", None),
    "no product reads it": (SCALED.replace("m = ", "ROOT m = "), None),
    "rows differ": (SCALED.replace("broadcast(s), dimensions={1}", "broadcast(s), dimensions={0}") + PRODUCT, None),
    "an operand of the same size": (
        SCALED.replace("r = f32[8,8] broadcast(s), dimensions={1}", "r = f32[8,8] parameter(3)") + PRODUCT, None),
    "rows are turned before": (GATHERED + "t = f32[8,8] transpose(g), dimensions={1,0}\n "
        "m = f32[8,8] multiply(t, r)\n" + PRODUCT, None),
    "something is summed": (GATHERED + "k = f32[] constant(0)\n q = f32[8] reduce(g, k), dimensions={1}, to_apply=add\n"
        " m = f32[8,8] broadcast(q), dimensions={0}\n" + PRODUCT, None),
    "each device has its own scale": (SCALED.replace(", sharding={replicated}", "") + PRODUCT, canonical.OTHERS),
    "a scale follows from the device": (SCALED.replace("s = f32[8] parameter(2), sharding={replicated}",
        "u = u32[] partition-id()\n v = f32[] convert(u)\n s = f32[8] broadcast(v), dimensions={}") + PRODUCT,
        canonical.OTHERS),
    "it gets wider": (WIDE + PRODUCT, canonical.WIDER),
    "ordered by the program": (SCALED.replace("r), ", "r), ").replace("multiply(g, r)",
        "multiply(g, r), control-predecessors={x}") + PRODUCT, None),
    "written by the user as a collective matmul": (SCALED.replace("GROUPS",
        'GROUPS, metadata={op_name="jit(f)/collective_matmul/all_gather"}') + PRODUCT, None),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_elementwise_operations_go_before_the_gather(name: str) -> None:
    after, notes = run(module(LATE[name]))
    assert notes == ["all-gathers moved behind elementwise operations (count=1)"]
    (gather,) = [i for i in after.entry.instructions if i.opcode == "all-gather"]
    assert gather.operands[0].opcode in ("multiply", "maximum", "clamp")
    assert list(gather.operands[0].shape.dimensions) == [2, 8]


@pytest.mark.parametrize("name", LEFT)
def test_gathers_left_alone(name: str) -> None:
    lines, reason = LEFT[name]
    given = module(lines)
    assert run(given) == (given, [] if reason is None else [f"left alone: {reason} (count=1)"])


def test_narrower_types_are_gathered() -> None:
    lines = WIDE.replace("bf16", "f64").replace("f32", "bf16").replace("f64", "f32") + PRODUCT.replace("f32", "bf16")
    after, _ = run(module(lines))
    (gather,) = [i for i in after.entry.instructions if i.opcode == "all-gather"]
    assert repr(gather).startswith("g = bf16[8,8] all-gather(")


# all-reduce -> dynamic-slice

SUMMED = """x = f32[8,8] parameter(0)
  s = f32[8,8] all-reduce(x), to_apply=add, GROUPS
  z = s32[] constant(0)
  d = u32[] partition-id()
  n = s32[] convert(d)
  k = s32[] constant(2)
  b = s32[] multiply(n, k)
"""
PART = "ROOT p = f32[2,8] dynamic-slice(s, b, z), dynamic_slice_sizes={2,8}"
BESIDE = "y = f32[8,8] parameter(1)\n t = f32[8,8] all-reduce(y), to_apply=add, GROUPS\n q = f32[8,8] add(s, t)\n"
OF_TABLE = """t = s32[4] constant({0, 2, 4, 6})
  e = s32[1] dynamic-slice(t, d), dynamic_slice_sizes={1}
  b = s32[] reshape(e)"""
PAIRS = "channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true"
OFFSET = """k = s32[] constant(2)
  b = s32[] multiply(n, k)
"""
OF_PAIRS = """h = u32[] constant(2)
  i = u32[] divide(d, h)
  j = s32[] convert(i)
  k = s32[] constant(4)
  b = s32[] multiply(j, k)
"""
TURNED = BESIDE.replace("add(s, t)", "add(s, u)").replace("q =", "u = f32[8,8] transpose(t), dimensions={1,0}\n q =")
SCATTERED = {
    "a sum": SUMMED + PART,
    "an offset out of a table": SUMMED.replace("b = s32[] multiply(n, k)", OF_TABLE) + PART,
    "the second dimension": SUMMED + "ROOT p = f32[8,2] dynamic-slice(s, n, b), dynamic_slice_sizes={8,2}",
    "a sum of sums": SUMMED + BESIDE + PART.replace("(s,", "(q,"),
    "twice the same": SUMMED + "q = f32[8,8] add(s, s)\n" + PART.replace("(s,", "(q,"),
    "moved": SUMMED + TURNED + PART.replace("(s,", "(q,"),
    "pairs across": SUMMED.replace("GROUPS", PAIRS).replace(OFFSET, OF_PAIRS)
    + "ROOT p = f32[4,8] dynamic-slice(s, b, z), dynamic_slice_sizes={4,8}",
}  # fmt: skip
KEPT = {
    "the next device's part": (SUMMED.replace("convert(d)", "convert(d)\n i = s32[] constant(1)\n o = s32[] add(n, i)")
        .replace("multiply(n,", "multiply(o,") + PART, canonical.ELSEWHERE),
    "an offset that is given": (SUMMED.replace("n = s32[] convert(d)", "n = s32[] parameter(1)") + PART,
        canonical.ELSEWHERE),
    "a table of other parts": (SUMMED.replace("b = s32[] multiply(n, k)", OF_TABLE.replace("2, 4", "4, 2")) + PART,
        canonical.ELSEWHERE),
    "a table that is too short": (SUMMED.replace("b = s32[] multiply(n, k)",
        OF_TABLE.replace("s32[4] constant({0, 2, 4, 6})", "s32[3] constant({0, 2, 4})")) + PART, canonical.ELSEWHERE),
    "half of a part": (SUMMED + PART.replace("2,8", "1,8"), canonical.ELSEWHERE),
    "a part of both dimensions": (SUMMED + PART.replace("2,8", "2,2"), canonical.ELSEWHERE),
    "groups across": (SUMMED.replace("{{0,1,2,3}}", "{{0,2,1,3}}").replace("GROUPS",
        "channel_id=1, replica_groups={{0,2,1,3}}, use_global_device_ids=true") + PART, canonical.ELSEWHERE),
    "more devices than summed": (SUMMED.replace("GROUPS",
        "channel_id=1, replica_groups={{4,5,6,7}}, use_global_device_ids=true") + PART, canonical.ELSEWHERE),
    "replicas": (SUMMED.replace("GROUPS", "replica_groups={{0,1,2,3}}") + PART, canonical.ELSEWHERE),
    "a bias is added": (SUMMED + "y = f32[8,8] parameter(1)\n q = f32[8,8] add(s, y)\n" + PART.replace("(s,", "(q,"),
        canonical.MIXED),
    "sums over other devices": (SUMMED + BESIDE.replace("GROUPS", PAIRS) + PART.replace("(s,", "(q,"), canonical.MIXED),
    "another reduction": (SUMMED.replace("to_apply=add", "to_apply=maximum") + PART, canonical.MIXED),
    "the whole sum is wanted too": (SUMMED + PART.replace("ROOT ", "") + "\n ROOT r = (f32[2,8], f32[8,8]) tuple(p, s)",
        canonical.READ),
    "ordered by the program": (SUMMED + PART.replace("ROOT ", "")
        + "\n ROOT r = f32[2,8] negate(p), control-predecessors={s}", canonical.READ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCATTERED)
def test_a_sum_of_which_each_device_keeps_its_part_is_scattered(name: str) -> None:
    before = module(SCATTERED[name])
    after, notes = run(module(SCATTERED[name]))
    assert notes == ["sliced all-reduces are now reduce-scatters (count=1)"]
    assert opcodes(after).count("reduce-scatter") == 1 and "all-reduce" not in opcodes(after)
    before, after = in_tuple(before), in_tuple(after)
    arguments = partitioned.whole_numbers(before, 4)
    np.testing.assert_array_equal(partitioned.execute(before, arguments), partitioned.execute(after, arguments))


def in_tuple(given: HloModule) -> HloModule:
    given.entry.root = Builder(given.entry).tuple([given.entry.root])
    return given


@pytest.mark.parametrize("name", KEPT)
def test_sums_left_alone(name: str) -> None:
    lines, reason = KEPT[name]
    given = module(lines)
    assert run(given) == (given, [f"left alone: {reason} (count=1)"])


# Both rewrites, with the dimensions in any order

STEPS = ("multiply(V, r)", "subtract(r, V)", "maximum(V, r)", "negate(V)", "clamp(least, V, most)")
MESHES = (("{{0,1,2,3}}", "b = s32[] multiply(n, k)", 2), ("{{0,2},{1,3}}", OF_PAIRS.strip().replace("k =", "four =")
    .replace("(j, k)", "(j, four)"), 4))  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A gather, elementwise operations, products, sums over devices, their total, and a slice of the total."""
    gathered, cut = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    groups, offset, size = draw(st.sampled_from(MESHES))
    whole, part = [8, 8], [8, 8]
    whole[gathered] = part[cut] = size
    tail = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    lines = [f"x = f32{whole} parameter(0)", "s = f32[8] parameter(1), sharding={replicated}",
        f"r = f32[8,8] broadcast(s), dimensions={{{1 - gathered}}}", "least = f32[] constant(-2)",
        "most = f32[] constant(2)", f"v0 = f32[8,8] all-gather(x), dimensions={{{gathered}}}, {tail}"]  # fmt: skip
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=3))
    lines += [f"v{n + 1} = f32[8,8] {step.replace('V', f'v{n}')}" for n, step in enumerate(steps)]
    total = ""
    for n in range(draw(st.integers(1, 3))):
        sides = draw(st.tuples(st.integers(0, 1), st.integers(0, 1)))
        lines += [f"w{n} = f32[8,8] parameter({n + 2})", f"y{n} = f32[8,8] dot(v{len(steps)}, w{n}), "
            f"lhs_contracting_dims={{{sides[0]}}}, rhs_contracting_dims={{{sides[1]}}}",
            f"a{n} = f32[8,8] all-reduce(y{n}), to_apply=add, {tail}"]  # fmt: skip
        term = f"a{n}"
        if draw(st.booleans()):
            lines.append(f"t{n} = f32[8,8] transpose(a{n}), dimensions={{1,0}}")
            term = f"t{n}"
        lines += [f"q{n} = f32[8,8] add({total}, {term})"] if total else []
        total = f"q{n}" if total else term
    begin = ["z", "b"] if cut else ["b", "z"]
    lines += ["z = s32[] constant(0)", "d = u32[] partition-id()", "n = s32[] convert(d)", "k = s32[] constant(2)"]
    sizes = f"dynamic_slice_sizes={{{part[0]},{part[1]}}}"
    lines += [offset, f"p = f32{part} dynamic-slice({total}, {begin[0]}, {begin[1]}), {sizes}"]
    lines += [f"ROOT o = (f32{part}) tuple(p)"]
    return "\n".join(lines).replace(", 8]", ",8]").replace(", 2]", ",2]").replace(", 4]", ",4]")


@hypothesis.given(programs())
@hypothesis.settings(max_examples=6)
def test_any_program_computes_the_same(lines: str) -> None:
    before, (after, notes) = module(lines), run(module(lines))
    assert len(notes) == 2 and not any("left alone" in note for note in notes)
    arguments = partitioned.whole_numbers(before, 4)
    np.testing.assert_array_equal(partitioned.execute(before, arguments), partitioned.execute(after, arguments))
