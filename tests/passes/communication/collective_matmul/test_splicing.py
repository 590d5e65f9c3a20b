"""Splicing parts of one module into another: names, numbers, channels and groups; dots in the simplifier's form."""

import hypothesis
import hypothesis.strategies as st
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.communication.collective_matmul.pattern import Pattern
from dhelix.passes.communication.collective_matmul.splicing import Splicer, canonical_dots, prepare
from dhelix.passes.hlo import HloModule, verify
from dhelix.profiles.collective_matmul.sites import KINDS, Site
from dhelix.tests.passes.communication.collective_matmul.forms import TYPES, program_text

SIZES = st.integers(1, 4)


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    kind, axis = draw(st.sampled_from(KINDS)), (draw(SIZES), draw(st.integers(2, 4)), draw(SIZES))
    gathers = kind == "all_gather_matmul"
    contractions = tuple(draw(st.lists(SIZES, min_size=1, max_size=1 if gathers else 3)))
    columns = tuple(draw(st.lists(SIZES, min_size=1, max_size=3 if gathers else 1)))
    batch = draw(SIZES)
    rows = batch * draw(SIZES) * axis[1]
    site = Site(kind, rows, sum(contractions), sum(columns), draw(st.sampled_from(list(TYPES))), axis[1])
    return Pattern(site, batch, contractions, columns, gathers and draw(st.booleans()), draw(st.booleans()), axis)


def target(program: HloModule) -> HloModule:
    """A module with the parameters of `program`, and a collective and a name of its own."""
    lines = [
        f"  x{p.proto.parameter_number} = {_text(p)} parameter({p.proto.parameter_number})" for p in _given(program)
    ]
    gather = "all-gather(x0), channel_id=7, replica_groups={{0,1}}, dimensions={1}, use_global_device_ids=true"
    first = _given(program)[0].shape
    sizes = [first.dimensions[0], 2 * first.dimensions[1], first.dimensions[2]]
    kind = _text(_given(program)[0]).partition("[")[0]
    lines.append(f"  ROOT g.3 = {kind}[{','.join(map(str, sizes))}] {gather}")
    return HloModule.from_text("HloModule target\nENTRY e {\n" + "\n".join(lines) + "\n}")


def _given(program: HloModule) -> list:
    return program.entry.parameters


def _text(instruction: object) -> str:
    return repr(instruction).split(" = ")[1].split(" ")[0]


@hypothesis.given(patterns())
@hypothesis.settings(max_examples=40)
def test_what_is_spliced_in_twice_verifies_and_shares_nothing(pattern: Pattern) -> None:
    program = prepare(HloModule.from_text(program_text(pattern)))
    kept = program.to_bytes()
    module = target(program)
    splicer = Splicer(module)
    for _ in range(2):
        splicer.import_entry(program, module.entry, module.entry.parameters, "jit(step)/here")
    verify(HloModule.from_bytes(module.to_bytes()))
    instructions = [i for c in module.computations for i in c.instructions]
    ids = [i.proto.id for i in instructions]
    channels = [i.proto.channel_id for i in instructions if i.proto.channel_id]
    assert len(set(ids)) == len(ids) and len(set(channels)) == len(channels) == 3
    assert {i.op_name for i in instructions} <= {"", "jit(step)/here"}
    assert program.to_bytes() == kept, "what is spliced in stays as it was"


@hypothesis.given(patterns())
@hypothesis.settings(max_examples=20)
def test_results_have_the_shapes_of_the_entrys(pattern: Pattern) -> None:
    program = prepare(HloModule.from_text(program_text(pattern)))
    module = target(program)
    results = Splicer(module).import_entry(program, module.entry, module.entry.parameters, "here")
    assert [_text(r) for r in results] == [_text(o) for o in program.entry.root.operands]


def test_groups_are_listed() -> None:
    """Groups that name a mesh axis are written as lists, because the target module does not have that mesh."""
    source = """HloModule form, num_partitions=8
ENTRY e { x = f32[2,4] parameter(0)
  ROOT g = f32[4,4] all-gather(x), channel_id=1, dimensions={0}, use_global_device_ids=true,
    replica_groups=mesh['a'=4,'b'=2] {'b'} }"""
    module = HloModule.from_text("HloModule m\nENTRY e { ROOT x = f32[2,4] parameter(0) }")
    (gather,) = Splicer(module).import_entry(HloModule.from_text(source), module.entry, module.entry.parameters, "here")
    assert device_groups(gather) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert not gather.proto.HasField("mesh_replica_groups") and len(gather.proto.replica_groups) == 4


def test_computations_are_copied_with_their_callers() -> None:
    source = """HloModule form
body { s = (s32[], f32[4]) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  v = f32[4] get-tuple-element(s), index=1
  one = s32[] constant(1)
  m = s32[] add(n, one)
  w = f32[4] add(v, v)
  ROOT t = (s32[], f32[4]) tuple(m, w) }
condition { s = (s32[], f32[4]) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  three = s32[] constant(3)
  ROOT c = pred[] compare(n, three), direction=LT }
ENTRY e { x = f32[4] parameter(0)
  zero = s32[] constant(0)
  s = (s32[], f32[4]) tuple(zero, x)
  l = (s32[], f32[4]) while(s), condition=condition, body=body
  ROOT y = f32[4] get-tuple-element(l), index=1 }"""
    module = HloModule.from_text("HloModule m\nENTRY e { ROOT x = f32[4] parameter(0) }")
    program = HloModule.from_text(source)
    splicer = Splicer(module)
    for _ in range(2):
        (result,) = splicer.import_entry(program, module.entry, module.entry.parameters, "here")
    module.entry.root = result
    after = HloModule.from_bytes(module.to_bytes())
    verify(after)
    assert len(after.computations) == 5, "each loop has a body and a condition of its own"


def test_arguments_have_to_fit() -> None:
    program = HloModule.from_text("HloModule form\nENTRY e { ROOT x = f32[4] parameter(0) }")
    module = HloModule.from_text("HloModule m\nENTRY e { ROOT x = f32[5] parameter(0) }")
    with pytest.raises(DhelixError, match="takes"):
        Splicer(module).import_entry(program, module.entry, module.entry.parameters, "here")


def test_what_only_the_partitioner_knows_is_refused() -> None:
    call = 'ROOT y = f32[4] custom-call(x), custom_call_target="Sharding"'
    text = f"HloModule form\nENTRY e {{ x = f32[4] parameter(0)\n  {call} }}"
    with pytest.raises(DhelixError, match="only the partitioner can process"):
        prepare(HloModule.from_text(text))


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "numbers", "canonical"),
    [
        ("2,3,4", "4,5", "2,3,5", "lhs_contracting_dims={2}, rhs_contracting_dims={0}", True),
        ("2,3,4", "5,4", "2,3,5", "lhs_contracting_dims={2}, rhs_contracting_dims={1}", True),
        ("2,3,4", "2,3,5", "4,5", "lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}", True),
        ("3,4", "4,5", "3,5", "lhs_contracting_dims={1}, rhs_contracting_dims={0}", True),
        ("3,4", "2,4,5", "3,2,5", "lhs_contracting_dims={1}, rhs_contracting_dims={1}", False),
        ("2,3,4", "2,4,5", "2,3,5", "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, "
         "rhs_contracting_dims={1}", False),
    ],
)  # fmt: skip
def test_dots_become_products_of_matrices(lhs: str, rhs: str, out: str, numbers: str, canonical: bool) -> None:
    module = HloModule.from_text(
        f"HloModule m\nENTRY e {{ a = f32[{lhs}] parameter(0)\n  b = f32[{rhs}] parameter(1)\n"
        f"  ROOT c = f32[{out}] dot(a, b), {numbers} }}"
    )
    canonical_dots(module.entry)
    after = HloModule.from_bytes(module.to_bytes())
    verify(after)
    (dot,) = [i for i in after.entry.instructions if i.opcode == "dot"]
    assert (len(dot.shape.dimensions) == 2 and all(len(o.shape.dimensions) == 2 for o in dot.operands)) == canonical
    assert list(after.entry.root.shape.dimensions) == [int(n) for n in out.split(",")]
