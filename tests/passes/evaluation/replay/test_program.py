"""The measuring program of a small scheduled step, given as text; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.analysis.collectives import device_groups
from dhelix.passes.evaluation.replay.operators import Buffer, Operator, find_operators
from dhelix.passes.evaluation.replay.program import Item, OperatorReplay, Program, parse_name, placeholder_name, split
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule, Instruction, shapes
from dhelix.profiles.keys import Key, OperatorKey

STEP = """
HloModule step, is_scheduled=true, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

scaled {
  x = bf16[8,16]{0,1} parameter(0)
  factor = bf16[] parameter(1)
  all = bf16[8,16]{0,1} broadcast(factor), dimensions={}
  ROOT product = bf16[8,16]{0,1} multiply(x, all)
}

updated {
  stack = f32[4,16] parameter(0)
  slot = f32[1,16] parameter(1)
  layer = s32[] parameter(2)
  zero = s32[] constant(0)
  ROOT written = f32[4,16] dynamic-update-slice(stack, slot, layer, zero)
}

updated.1 {
  stack.1 = f32[8,16] parameter(0)
  slot.1 = f32[1,16] parameter(1)
  layer.1 = s32[] parameter(2)
  zero.1 = s32[] constant(0)
  ROOT written.1 = f32[8,16] dynamic-update-slice(stack.1, slot.1, layer.1, zero.1)
}

around_update {
  p.0 = f32[8,16] parameter(0)
  p.1 = f32[1,16] parameter(1)
  p.2 = s32[] parameter(2)
  ROOT update.inside = f32[8,16] fusion(p.0, p.1, p.2), kind=kLoop, calls=updated.1
}

around_gather {
  shard = bf16[128] parameter(0)
  ROOT gather.inside = bf16[512] all-gather(shard), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0},
    use_global_device_ids=true
}

body {
  state = (s32[], f32[8,16]) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(count, one)
  held = f32[8,16] get-tuple-element(state), index=1
  row = f32[1,16] constant({{1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}})
  update-start = ((f32[8,16], f32[1,16], s32[]), f32[8,16], u32[]) async-start(held, row, count), calls=around_update
  update-done = f32[8,16] async-done(update-start)
  ROOT carried = (s32[], f32[8,16]) tuple(next, update-done)
}

condition {
  state.1 = (s32[], f32[8,16]) parameter(0)
  count.1 = s32[] get-tuple-element(state.1), index=0
  limit = s32[] constant(4)
  ROOT goes_on = pred[] compare(count.1, limit), direction=LT
}

ENTRY main {
  x = bf16[8,16]{0,1} parameter(0)
  factor = bf16[] parameter(1)
  shard = bf16[128] parameter(2)
  stack = f32[4,16] parameter(3)
  stack.1 = f32[8,16] parameter(4)
  layer = s32[] parameter(5)
  w = bf16[16,16] parameter(6)
  scaled = bf16[8,16]{0,1} fusion(x, factor), kind=kLoop, calls=scaled
  gather-start = ((bf16[128]), bf16[512]) async-start(shard), calls=around_gather,
    backend_config={"collective_backend_config":{"is_sync":false}}
  gemm = (bf16[8,16], s8[256]) custom-call(scaled, w), custom_call_target="__cublas$lt$matmul"
  gather-done = bf16[512] async-done(gather-start)
  gemm.again = (bf16[8,16], s8[256]) custom-call(scaled, w), custom_call_target="__cublas$lt$matmul"
  product = bf16[8,16] get-tuple-element(gemm), index=0
  grown = bf16[8,16] custom-call(scaled, w, product), custom_call_target="__cublas$lt$matmul",
    output_to_operand_aliasing={{}: (2, {})}
  sum = f32[] constant(0)
  reduced = f32[4,16] all-reduce(stack), channel_id=2, replica_groups=[1,4]<=[4], use_global_device_ids=true,
    to_apply=add, backend_config={"collective_backend_config":{"is_sync":true}}
  twice = f32[4,16] custom-call(gemm), custom_call_target="__cublas$gemm"
  row = f32[1,16] constant({{1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}})
  updated = f32[4,16] fusion(reduced, row, layer), kind=kLoop, calls=updated
  moved = bf16[16,16] copy(w)
  exchanged = bf16[16,16] all-to-all(w), channel_id=4, replica_groups=[1,4]<=[4], dimensions={0}
  first = s32[] constant(0)
  state = (s32[], f32[8,16]) tuple(first, stack.1)
  loop = (s32[], f32[8,16]) while(state), condition=condition, body=body
  hello = s32[] custom-call(layer), custom_call_target="xla_ffi_python_gpu_callback"
  ready = token[] after-all()
  sent = (bf16[512], u32[], token[]) send(gather-done, ready), channel_id=3
  sent.done = token[] send-done(sent), channel_id=3
  drawn = f32[4] rng(sum, sum), distribution=rng_uniform
  ROOT result = f32[4,16] copy(updated)
}
"""


def key_of(instruction: Instruction) -> Key | None:
    """Uses names without numbers as keys. Arithmetic on the loop's counter gets no key, because it costs nothing."""
    if instruction.opcode in ("add", "compare"):
        return None
    return OperatorKey("other", instruction.name.partition(".")[0].removesuffix("-start"), ())


@pytest.fixture(scope="module")
def found() -> tuple[tuple[Operator, ...], tuple[tuple[str, str], ...]]:
    return find_operators(HloModule.from_text(STEP), key_of)


@pytest.fixture(scope="module")
def operators(found: tuple[tuple[Operator, ...], object]) -> dict[str, Operator]:
    return {str(o.key).split()[1]: o for o in found[0]}


def placeholder(program: Program) -> bytes:
    lines = [f"p{n} = {b.element_type}[{b.elements}] parameter({n})" for n, b in enumerate(program.buffers)]
    body = "\n".join([*lines, "zero = f32[1] constant({0})", "ROOT root = f32[1] copy(zero)"])
    text = f"HloModule {placeholder_name(program)}, is_scheduled=true, num_partitions=4\nENTRY main {{\n{body}\n}}"
    return HloModule.from_text(text).to_bytes()


def replay(*items: Item, repeats: int = 1, marks: bool = False) -> HloModule:
    """The measuring program of the items, which the pass manager has verified."""
    program = Program(items, repeats, marks)
    manager = PassManager([OperatorReplay(program)], strict=True)
    result, _ = manager.run(Stage.POST_SCHEDULER, placeholder(program))
    assert result is not None
    return HloModule.from_bytes(result)


def launched(module: HloModule) -> list[str]:
    """Names of the instances in launch order."""
    return [i.name for i in module.schedule[module.entry] if parse_name(i.name) is not None]


def named(module: HloModule, name: str) -> Instruction:
    return next(i for c in module.computations for i in c.instructions if i.name == name)


# Finding


def test_each_key_has_one_operator_in_the_order_in_which_they_run(operators: dict[str, Operator]) -> None:
    expected = "scaled gather gemm grown reduced twice updated moved exchanged update result"
    assert list(operators) == expected.split()
    assert operators["gemm"].instruction.name == "gemm"


def test_what_cannot_be_isolated_is_refused_with_a_reason(found: tuple[object, tuple[tuple[str, str], ...]]) -> None:
    assert dict(found[1]) == {
        "hello": "custom call xla_ffi_python_gpu_callback may keep state of its own",
        "sent": "it has side effects",
        "drawn": "it has side effects",
    }


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("ROOT r = f32[8] call(p), to_apply=f", "it runs a loop, a call or a branch"),
        ("q = f32[8] copy(p)\n ROOT r = f32[8] copy(q)", "it is an asynchronous computation of several instructions"),
    ],
)
def test_asynchronous_computations_that_are_more_than_one_kernel_are_refused(inside: str, reason: str) -> None:
    text = f"""HloModule step, is_scheduled=true
    f {{
      p = f32[8] parameter(0)
      ROOT r = f32[8] negate(p)
    }}
    around {{
      p = f32[8] parameter(0)
      {inside}
    }}
    ENTRY main {{
      x = f32[8] parameter(0)
      start = ((f32[8]), f32[8], u32[]) async-start(x), calls=around
      ROOT done = f32[8] async-done(start)
    }}"""
    assert find_operators(HloModule.from_text(text), key_of) == ((), (("start", reason),))


@pytest.mark.parametrize(("lengths", "count"), [("parameter(1)", 0), ("constant({8,8})", 1)])
def test_lengths_that_a_step_computes_are_no_random_numbers(lengths: str, count: int) -> None:
    text = f"""HloModule step, is_scheduled=true
    ENTRY main {{
      x = bf16[2,8] parameter(0)
      lengths = s32[2] {lengths}
      ROOT out = bf16[2,8] custom-call(x, lengths), custom_call_target="__cudnn$fmhaSoftmax"
    }}"""
    operators, refused = find_operators(HloModule.from_text(text), key_of)
    assert len(operators) == count
    assert refused == (() if count else (("out", "the memory that it touches depends on lengths that it reads"),))


def test_a_key_that_is_refused_once_may_have_an_operator_elsewhere() -> None:
    text = """HloModule step, is_scheduled=true
    ENTRY main {
      x = f32[8] parameter(0)
      same = f32[8] custom-call(x), custom_call_target="mine"
      ROOT same.1 = f32[8] custom-call(x), custom_call_target="__cublas$gemm"
    }"""
    operators, refused = find_operators(HloModule.from_text(text), key_of)
    assert [o.instruction.name for o in operators] == ["same.1"]
    assert refused == ()


def test_a_lowered_module_is_an_error() -> None:
    with pytest.raises(DhelixError, match="no schedule; give the compiled module"):
        find_operators(HloModule.from_text(STEP.replace(", is_scheduled=true", "")), key_of)


# Alone


def test_an_operator_is_cloned_as_it_was_compiled(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["scaled"]))
    clone = named(module, "replay_0_first_0")
    assert clone.proto.fusion_kind == "kLoop"
    assert [i.opcode for i in clone.called[0].instructions] == ["parameter", "parameter", "broadcast", "multiply"]
    view = clone.operands[0]
    assert (view.opcode, view.operands[0].opcode) == ("bitcast", "parameter")
    assert list(view.shape.layout.minor_to_major) == [0, 1]
    assert list(view.operands[0].shape.dimensions) == [128]


def test_no_two_operands_share_a_buffer_and_all_items_share_the_same(operators: dict[str, Operator]) -> None:
    gemm = operators["gemm"]
    program = Program((Item(gemm), Item(gemm, gemm), Item(operators["moved"])), 3)
    a, w = Buffer("bf16", 128, 256), Buffer("bf16", 256, 512)
    assert program.buffers == (a, a, w, w)
    assert program.argument_bytes == 2 * 256 + 2 * 512
    module = replay(*program.items)
    read = [
        v.operands[0] for name in ("replay_1_first_0-start", "replay_1_second_0") for v in named(module, name).operands
    ]
    assert len(set(read)) == 4


def test_constants_are_the_same_and_indices_zero(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["updated"]))
    _, row, layer = named(module, "replay_0_first_0").operands
    assert list(row.proto.literal.f32s) == list(range(1, 17))
    assert list(layer.proto.literal.s32s) == [0]


def test_tuples_are_built(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["twice"]))
    (given,) = named(module, "replay_0_first_0").operands
    assert given.opcode == "tuple"
    assert [shapes.text(e.shape) for e in given.operands] == ["bf16[8,16]", "s8[256]"]


@pytest.mark.parametrize("name", ["updated", "grown", "update"])
def test_what_is_written_over_is_a_fresh_copy_in_each_repeat(name: str, operators: dict[str, Operator]) -> None:
    module = replay(Item(operators[name]), repeats=2)
    expected = ["replay_0_copy_0", "replay_0_first_0", "replay_0_copy_1", "replay_0_first_1"]
    assert launched(module) == expected
    for repeat in (0, 1):
        copy = named(module, f"replay_0_copy_{repeat}")
        assert copy in named(module, f"replay_0_first_{repeat}").operands
        assert copy.operands[0].opcode == "bitcast"


def test_a_fusion_that_the_step_starts_runs_synchronously_alone(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["update"]))
    clone = named(module, "replay_0_first_0")
    assert clone.opcode == "fusion"
    assert clone.computation is module.entry
    assert [o.opcode for o in clone.operands] == ["copy", "constant", "constant"]


def test_a_collective_alone_is_what_it_is_in_the_step(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gather"]), Item(operators["reduced"]))
    assert launched(module) == ["replay_0_first_0-start", "replay_0_first_0-done", "replay_1_first_0"]
    assert named(module, "replay_0_first_0").opcode == "all-gather"
    assert named(module, "replay_1_first_0").opcode == "all-reduce"


# Pairs


def test_compute_under_a_collective(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gather"], operators["gemm"]))
    assert launched(module) == ["replay_0_first_0-start", "replay_0_second_0", "replay_0_first_0-done"]
    start = named(module, "replay_0_first_0-start")
    assert start.proto.backend_config == b'{"collective_backend_config":{"is_sync":false}}'
    assert shapes.text(start.shape) == "((bf16[128]), bf16[512])"


def test_a_collective_after_compute_does_not_wait_for_it(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gemm"], operators["gather"]))
    sides = ["replay_0_first_0", "replay_0_second_0"]
    assert launched(module) == [*(f"{s}-start" for s in sides), *(f"{s}-done" for s in sides)]
    start = named(module, "replay_0_first_0-start")
    assert start.opcode == "async-start"
    assert start.called[0].root is named(module, "replay_0_first_0")
    assert start.called[0] in module.schedule
    assert shapes.text(start.shape.tuple_shapes[2]) == "u32[]"


def test_two_that_compute(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gemm"], operators["scaled"]))
    assert launched(module) == ["replay_0_first_0-start", "replay_0_second_0", "replay_0_first_0-done"]


def test_two_collectives_get_a_stream_each_and_stay_apart(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gather"], operators["reduced"]))
    sides = ["replay_0_first_0", "replay_0_second_0"]
    assert launched(module) == [*(f"{s}-start" for s in sides), *(f"{s}-done" for s in sides)]
    streams = [named(module, f"{s}-start").proto.frontend_attributes.map["_xla_stream_annotation"] for s in sides]
    assert streams == ["0", "1"]
    between = named(module, "replay_0_first_0-done").control_predecessors
    assert [i.opcode for i in between] == ["after-all"]


def test_a_synchronous_collective_becomes_asynchronous_in_a_pair(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["reduced"], operators["gemm"]))
    start = named(module, "replay_0_first_0-start")
    assert b'"is_sync": false' in start.proto.backend_config
    assert named(module, "replay_0_first_0").proto.backend_config == b""


def test_what_xla_does_not_start_bare_is_called_from_the_start(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["moved"], operators["gemm"]))
    (body,) = named(module, "replay_0_first_0-start").called
    assert body.root.opcode == "call"
    assert body.root.called[0].root is named(module, "replay_0_first_0")


def test_copies_for_both_sides_come_before_either_starts(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["updated"], operators["grown"]))
    copies = ["replay_0_copy_0", "replay_0_copy_0.1"]
    assert launched(module) == [*copies, "replay_0_first_0-start", "replay_0_second_0", "replay_0_first_0-done"]


# Marks


def test_marks_stand_before_an_items_copies_and_before_its_sides(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["updated"]), Item(operators["gather"], operators["gemm"]), repeats=2, marks=True)
    for repeat in (0, 1):
        first = [f"replay_0_copy_{repeat}.mark", f"replay_0_copy_{repeat}", f"replay_0_mark_{repeat}"]
        second = [f"replay_1_copy_{repeat}.mark", f"replay_1_mark_{repeat}", f"replay_1_first_{repeat}-start"]
        expected = [*first, f"replay_0_first_{repeat}", *second, f"replay_1_second_{repeat}"]
        start = 9 * repeat
        assert launched(module)[start : start + 8] == expected
    assert {parse_name(n) for n in launched(module) if "mark" in n} == {
        (item, side, repeat) for item in (0, 1) for side in ("copy", "mark") for repeat in (0, 1)
    }


@pytest.mark.parametrize("name", ["gather", "reduced"])
def test_a_mark_is_a_tiny_all_reduce_over_the_groups_of_a_collective(name: str, operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gemm"]), Item(operators[name]), marks=True)
    mark = named(module, "replay_0_mark_0")
    assert (mark.opcode, shapes.text(mark.shape), len(mark.called)) == ("all-reduce", "f32[1]", 1)
    assert device_groups(mark) == ((0, 1, 2, 3),)
    assert mark.control_predecessors == [named(module, "replay_0_copy_0.mark")]
    assert not mark.proto.backend_config and not mark.proto.dimensions


def test_without_collectives_that_reduce_or_gather_there_is_nothing_to_mark_with(
    operators: dict[str, Operator],
) -> None:
    items = Item(operators["gemm"]), Item(operators["moved"], operators["scaled"]), Item(operators["exchanged"])
    assert launched(replay(*items, marks=True)) == launched(replay(*items))
    unmarked = replay(*items, Item(operators["gather"]))
    assert not any("mark" in name for name in launched(unmarked))


# The whole


def test_items_run_repeat_by_repeat_and_each_after_the_one_before(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["gemm"]), Item(operators["gather"], operators["scaled"]), repeats=2)
    order = [name.removesuffix("-start") for name in launched(module) if not name.endswith("-done")]
    assert order == [
        "replay_0_first_0",
        "replay_1_first_0",
        "replay_1_second_0",
        "replay_0_first_1",
        "replay_1_first_1",
        "replay_1_second_1",
    ]
    running = [i for i in module.schedule[module.entry] if i.control_predecessors]
    for before, after in zip(running[:-1], running[1:], strict=True):
        assert after.control_predecessors == [before]
    assert running[-1] is module.entry.root


def test_nothing_of_the_placeholder_is_left_but_its_signature(operators: dict[str, Operator]) -> None:
    module = replay(Item(operators["moved"]))
    opcodes = [i.opcode for i in module.schedule[module.entry]]
    assert opcodes == ["parameter", "bitcast", "copy", "constant", "copy"]
    assert shapes.text(module.entry.root.shape) == "f32[1]"


def test_the_same_program_gives_the_same_bytes_and_another_one_another_name() -> None:
    def program(text: str, repeats: int = 2) -> Program:
        operators, _ = find_operators(HloModule.from_text(text), key_of)
        return Program(tuple(Item(a, b) for a in operators for b in operators), repeats)

    one, same = program(STEP), program(STEP)
    given = placeholder(one)  # made once, because each parse gives another module id
    results = [PassManager([OperatorReplay(p)]).run(Stage.POST_SCHEDULER, given)[0] for p in (one, same)]
    assert results[0] is not None
    assert results[0] == results[1]
    assert placeholder_name(one) == placeholder_name(same)
    assert placeholder_name(one) != placeholder_name(program(STEP, repeats=3))
    assert placeholder_name(one) != placeholder_name(replace(one, marks=True))
    assert placeholder_name(one) != placeholder_name(program(STEP.replace("multiply(x, all)", "add(x, all)")))


def test_another_function_than_the_placeholder_is_refused(operators: dict[str, Operator]) -> None:
    program = Program((Item(operators["gemm"]),), 1)
    manager = PassManager([OperatorReplay(program)], strict=True)
    with pytest.raises(PassRefusal, match="not the program's placeholder"):
        manager.run(Stage.POST_SCHEDULER, HloModule.from_text(STEP).to_bytes())


@pytest.mark.parametrize("repeats", [0, 1])
def test_an_empty_program_is_an_error(repeats: int, operators: dict[str, Operator]) -> None:
    with pytest.raises(DhelixError, match="at least one item"):
        Program((Item(operators["gemm"]),) if repeats == 0 else (), repeats)


def test_split_keeps_order_and_limit(operators: dict[str, Operator]) -> None:
    items = [Item(operators[name]) for name in ("gemm", "moved", "scaled", "reduced", "twice", "gather")]
    groups = split(items, 1024)
    assert [item for group in groups for item in group] == items
    assert len(groups) < len(items)
    assert all(Program(group, 1).argument_bytes <= 1024 for group in groups)
    assert split(items, 1) == tuple((item,) for item in items)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("replay_3_first_0", (3, "first", 0)),
        ("replay_12_second_40.2", (12, "second", 40)),
        ("replay_3_copy_1.remat", (3, "copy", 1)),
        ("replay_0_first_1-start", (0, "first", 1)),
        ("replay_0_second_1-start::replay_0_second_1", (0, "second", 1)),
        ("while.3::replay_0_second_1.clone", (0, "second", 1)),
        ("replay_result", None),
        ("replay_5", None),
        ("my_replay_1_first_2", None),
        ("fusion.3", None),
        ("", None),
    ],
)
def test_names_are_read_back(name: str, parsed: tuple[int, str, int] | None) -> None:
    assert parse_name(name) == parsed
