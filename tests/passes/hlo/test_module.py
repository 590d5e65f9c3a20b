"""Reading and writing modules: nothing is lost, output is deterministic, and bad input gets one error."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.hlo import Builder, HloModule, Instruction, schema, shapes, verify
from dhelix.tests.passes.hlo.modules import BASE, VECTOR, base, effect, loop

SCHEDULED = """HloModule step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->(f32[], f32[4]{0})}
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT add = f32[] add(a, b)
}
wrapped {
  p = f32[4]{0} parameter(0)
  ROOT n = f32[4]{0} negate(p)
}, execution_thread="other"
ENTRY main {
  x = f32[4]{0} parameter(0), sharding={replicated}
  zero = f32[] constant(0)
  start = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(x), calls=wrapped, async_execution_thread="other"
  sum = f32[] reduce(x, zero), dimensions={0}, to_apply=add, control-predecessors={start}
  done = f32[4]{0} async-done(start), backend_config={"a":1}
  ROOT both = (f32[], f32[4]{0}) tuple(sum, done), metadata={op_name="jit(f)/tuple" source_line=3}
}
"""


def by_name(module: HloModule, name: str) -> Instruction:
    return next(i for c in module.computations for i in c.instructions if i.name == name)


def compiled_step() -> jax.stages.Lowered:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(h @ w), None

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    return jax.jit(jax.value_and_grad(loss)).lower(jnp.ones((3, 4, 4)), jnp.ones((2, 4)))


def test_an_unchanged_module_returns_its_bytes() -> None:
    source = jax_compat.parse_hlo_text(SCHEDULED)
    module = HloModule.from_bytes(source)
    assert module.to_bytes() == source
    assert module.to_bytes() == source  # writing changes nothing
    assert by_name(module, "both").op_name == "jit(f)/tuple"


def test_an_edit_that_is_taken_back_returns_the_bytes_too() -> None:
    module = HloModule.from_text(SCHEDULED)
    source = module.to_bytes()
    module.proto.name = "other"
    assert module.to_bytes() != source
    module.proto.name = "step"
    assert module.to_bytes() == source


@pytest.mark.parametrize("part", ["module", "computation", "instruction"])
def test_fields_that_the_schema_does_not_know_are_kept(part: str) -> None:
    unknown = bytes([0xC2, 0x3E, 3]) + b"abc"  # field 1000, three bytes
    proto = schema.ModuleProto.FromString(HloModule.from_text(SCHEDULED).to_bytes())
    owner = {"module": proto, "computation": proto.computations[0]}.get(part, proto.computations[0].instructions[0])
    owner.MergeFromString(unknown)
    source = proto.SerializeToString()
    module = HloModule.from_bytes(source)
    assert module.to_bytes() == source
    by_name(module, "both").proto.metadata.op_name = "changed"
    assert source.count(unknown) == module.to_bytes().count(unknown) == 1


def test_a_changed_module_keeps_what_it_does_not_declare() -> None:
    module = HloModule.from_text(SCHEDULED)
    by_name(module, "both").proto.metadata.op_name = "changed"
    text = module.to_text()
    for kept in ("sharding={replicated}", 'backend_config={"a":1}', "source_line=3", 'op_name="changed"'):
        assert kept in text
    assert 'execution_thread="other"' in text and "control-predecessors={%start}" in text


def test_what_xla_made_of_a_step_round_trips() -> None:
    lowered = compiled_step()
    stages = [lowered.as_text("hlo"), lowered.compile().as_text()]
    for text in stages:
        assert text is not None
        source = jax_compat.parse_hlo_text(text)
        module = HloModule.from_bytes(source)
        verify(module)
        assert module.to_bytes() == source
        assert module.clone().to_bytes() == module.to_bytes()
        assert module.instruction_count == sum(len(c.instructions) for c in module.clone().computations)


EDIT = """
import hashlib
from dhelix.tests.passes.hlo.test_module import edited
print(hashlib.sha256(edited()).hexdigest())
"""


def edited() -> bytes:
    """A module with new computations that are called in several places, and with its instructions in reversed order."""
    made = loop(0, 3, 1, condition_calls=True)
    module = made.computation.module
    builder = Builder(module.entry)
    function = Builder(module.new_computation("function"))
    function.finish(function.binary("add", function.parameter(0, VECTOR), function.computation.instructions[0]))
    calls = [builder.make("call", VECTOR, [module.entry.root], called=[function.computation]) for _ in range(4)]
    for call in calls:
        effect(builder, call).control_predecessors.extend(calls)
    for instruction in module.entry.instructions:
        for key in "zyxabc":
            instruction.proto.frontend_attributes.map[key] = key * 2
    module.proto.id = 0  # XLA numbers the texts that it parses
    module.computations.reverse()
    module.entry.instructions.reverse()
    return module.to_bytes()


def test_serialisation_is_the_same_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", EDIT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == hashlib.sha256(edited()).hexdigest()


def test_only_what_must_move_moves() -> None:
    module = base()
    builder = Builder(module.entry)
    x = module.entry.parameters[0]
    a, b, c, d = (builder.make("negate", VECTOR, [x], name=n) for n in "abcd")
    a.operands = [d]
    c.control_predecessors = [d]
    module.entry.sort()
    assert [i.name for i in module.entry.instructions] == [x.name, "y", d.name, a.name, b.name, c.name]
    order = list(module.entry.instructions)
    module.entry.sort()
    assert module.entry.instructions == order


def test_computations_move_before_their_callers_and_no_further() -> None:
    made = loop(0, 3, 1)
    module = made.computation.module
    before = [c.name for c in module.computations]
    extra = Builder(module.new_computation("extra"))
    extra.finish(extra.parameter(0, VECTOR))
    body = made.called[0]
    call = Builder(body).make("call", VECTOR, [body.root.operands[1]], called=[extra.computation])
    body.root.operands[1] = call
    module.to_bytes()
    place = before.index(body.name)
    assert [c.name for c in module.computations] == [*before[:place], extra.computation.name, *before[place:]]


@pytest.mark.parametrize("circle", ["data", "control", "calls"])
def test_a_circle_is_named(circle: str) -> None:
    made = loop(0, 3, 1)
    module = made.computation.module
    builder = Builder(module.entry)
    x = module.entry.parameters[0]
    a = builder.make("negate", VECTOR, [x], name="first")
    b = builder.make("negate", VECTOR, [a], name="second")
    if circle == "data":
        a.operands = [b]
    elif circle == "control":
        a.control_predecessors = [b]
    else:
        made.called[0].root.called = [module.entry]
    with pytest.raises(DhelixError, match="circle at body" if circle == "calls" else "circle at first"):
        module.to_bytes()


def test_what_a_pass_leaves_unused_goes_and_comes_back_in_use() -> None:
    made = loop(0, 3, 1)
    module = made.computation.module
    body, condition = made.called
    made.called = []
    module.to_bytes()
    assert module.computations == [module.entry]
    made.called = [body, condition]
    assert len(module.clone().computations) == len(module.computations) == 3
    verify(module)


def test_what_the_input_does_not_use_stays() -> None:
    unused = "unused {\n  p = s32[] parameter(0)\n  ROOT q = s32[] negate(p)\n}\n"
    proto = schema.ModuleProto.FromString(jax_compat.parse_hlo_text(BASE.replace("ENTRY", unused + "ENTRY")))
    module = HloModule.from_bytes(proto.SerializeToString())
    source = module.to_bytes()
    assert source == proto.SerializeToString() and len(module.computations) == 2
    module.entry.root.proto.metadata.op_name = "changed"
    assert [c.name for c in module.clone().computations] == ["unused", "main"]


def test_the_entry_can_be_replaced_and_its_signature_follows() -> None:
    module = base()
    builder = Builder(module.new_computation("other"))
    values = [builder.parameter(k, VECTOR) for k in range(2)]
    module.entry = builder.finish(builder.tuple(values))
    again = module.clone()
    assert again.entry.name == module.entry.name and len(again.computations) == 1
    for shape in (again.entry.proto.program_shape, again.proto.host_program_shape):
        assert len(shape.parameters) == 2 and list(shape.parameter_names) == [v.name for v in values]
        assert shapes.text(shape.result) == "(s32[4], s32[4])"
    assert "ENTRY %other.1" in module.to_text()


def test_schedules_are_read_edited_and_written() -> None:
    module = HloModule.from_text(SCHEDULED)
    assert module.is_scheduled
    sequence = module.schedule[module.entry]
    assert [i.name for i in sequence] == ["x", "zero", "start", "sum", "done", "both"]
    assert HloModule.from_text(BASE).schedule == {}
    by_name(module, "sum").control_predecessors.clear()
    sequence.remove(by_name(module, "sum"))
    sequence.insert(2, by_name(module, "sum"))
    verify(module)
    again = HloModule.from_text(module.to_text())
    assert [i.name for i in again.schedule[again.entry]] == ["x", "zero", "sum", "start", "done", "both"]
    module.schedule.clear()
    assert not module.clone().is_scheduled and "is_scheduled" not in module.to_text()


def test_names_are_unique_and_keep_their_stem() -> None:
    module = base()
    taken = {i.name for i in module.entry.instructions} | {"main"}
    for name in ("x", "x.7", "x.clone", "main", "y.1.2", "x.\u00b2", ""):
        made = Builder(module.entry).make("negate", VECTOR, [module.entry.root], name=name)
        assert made.name not in taken and made.name.startswith(name.split(".")[0])
        taken.add(made.name)


def test_new_ids_follow_the_ones_that_are_there() -> None:
    module = base()
    builder = Builder(module.entry)
    made = [builder.make("negate", VECTOR, [module.entry.root]) for _ in range(2)]
    module.to_bytes()
    ids = [i.proto.id for i in module.entry.instructions]
    assert len(set(ids)) == len(ids) and all(i >> 32 == module.entry.id for i in ids)
    first = [m.proto.id for m in made]
    module.to_bytes()
    assert [m.proto.id for m in made] == first


def test_dump_files_are_read(tmp_path: Path) -> None:
    compiled_step().compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True})
    compiled_step().compile({"xla_dump_to": str(tmp_path / "text"), "xla_dump_hlo_as_text": True})
    protos = sorted(tmp_path.glob("*.hlo.pb"))
    texts = sorted((tmp_path / "text").glob("*optimizations.txt"))
    assert len(protos) >= 2 and len(texts) >= 2
    for path in (*protos, *texts):
        module = HloModule.from_file(path)
        verify(module)
        assert module.name.startswith("jit_loss")
        bare = tmp_path / "bare.pb"
        bare.write_bytes(module.to_bytes())
        assert HloModule.from_file(bare).to_bytes() == module.to_bytes()


@pytest.mark.parametrize("content", [b"", b"not HLO at all", b"\x0a\xff\xff\xff", bytes(range(256))])
@pytest.mark.parametrize("name", ["a.pb", "a.hlo.pb", "a.txt"])
def test_a_file_that_is_not_hlo_gets_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DhelixError, match=f"{name}.*(no HLO|parse)"):
        HloModule.from_file(path)
    with pytest.raises(DhelixError, match="no such file"):
        HloModule.from_file(tmp_path / "other.pb")


def test_a_module_that_is_cut_short_gets_one_error() -> None:
    source = loop(0, 3, 1).computation.module.to_bytes()
    for length in range(0, len(source) - 30, 7):
        with pytest.raises(DhelixError, match="cut short"):
            HloModule.from_bytes(source[:length])


@pytest.mark.parametrize("what", ["operand", "root", "called", "twice", "entry"])
def test_ids_that_lead_nowhere_get_one_error(what: str) -> None:
    proto = schema.ModuleProto.FromString(loop(0, 3, 1).computation.module.to_bytes())
    entry = next(c for c in proto.computations if c.id == proto.entry_computation_id)
    if what == "operand":
        entry.instructions[-1].operand_ids[0] = 999
    elif what == "root":
        entry.root_id = 999
    elif what == "called":
        next(i for i in entry.instructions if i.opcode == "while").called_computation_ids[0] = 999
    elif what == "twice":
        entry.instructions[1].id = entry.instructions[0].id
    else:
        proto.entry_computation_id = 999
    with pytest.raises(DhelixError, match="missing or duplicated"):
        HloModule.from_bytes(proto.SerializeToString())


def test_text_that_xla_does_not_read_gets_its_message() -> None:
    with pytest.raises(DhelixError, match="HLO text"):
        HloModule.from_text("HloModule broken\nENTRY main { ROOT x = f32[4] nonsense(y) }")
