"""Attention calls in the placeholder of a measuring program, before XLA schedules it; nothing is compiled."""

from __future__ import annotations

import pytest

from dhelix.passes.evaluation.replay.library_calls import LibraryCalls
from dhelix.passes.evaluation.replay.operators import Operator, bring, find_operators, library_workspaces
from dhelix.passes.evaluation.replay.program import Item, Program, placeholder_name
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.hlo import HloModule, Instruction, shapes
from dhelix.profiles.keys import Key, OperatorKey

STEP = """
HloModule step, is_scheduled=true, num_partitions=4

around {
  p0 = bf16[1,256,8,64] parameter(0)
  p1 = bf16[1,256,8,64] parameter(1)
  p2 = bf16[1,256,8,64] parameter(2)
  ROOT inside = (bf16[1,256,8,64], f32[1,8,256], u8[4096]) custom-call(p0, p1, p2),
    custom_call_target="__cudnn$fmhaSoftmax"
}

ENTRY main {
  q = bf16[1,256,8,64] parameter(0)
  k = bf16[1,256,8,64] parameter(1)
  seed = s64[] parameter(2)
  w = bf16[64,64] parameter(3)
  lengths = s32[2] constant({256, 100})
  forward = (bf16[1,256,8,64], f32[1,8,256], u8[4096]) custom-call(q, k, k), custom_call_target="__cudnn$fmhaSoftmax",
    backend_config={"cudnn_fmha_backend_config":{"fmha_scale":0.125}}, metadata={op_name="jit(step)/attention"}
  out = bf16[1,256,8,64] get-tuple-element(forward), index=0
  softmax = f32[1,8,256] get-tuple-element(forward), index=1
  backward = (bf16[1,256,8,64], bf16[1,256,8,64], bf16[1,256,8,64], u8[8192]) custom-call(q, k, k, softmax, out, out),
    custom_call_target="__cudnn$fmhaSoftmaxBackward"
  padded = (bf16[1,256,8,64], f32[1,8,256], u8[0]) custom-call(q, k, q, lengths, seed),
    custom_call_target="__cudnn$fmhaSoftmaxDropout"
  started-start = ((bf16[1,256,8,64], bf16[1,256,8,64], bf16[1,256,8,64]),
    (bf16[1,256,8,64], f32[1,8,256], u8[4096]), u32[]) async-start(q, q, k), calls=around
  started-done = (bf16[1,256,8,64], f32[1,8,256], u8[4096]) async-done(started-start)
  gemm = (bf16[64,64], s8[256]) custom-call(w, w), custom_call_target="__cublas$lt$matmul"
  ROOT moved = bf16[64,64] copy(w)
}
"""


def key_of(instruction: Instruction) -> Key:
    return OperatorKey("other", instruction.name.removesuffix("-start"), ())


@pytest.fixture(scope="module")
def operators() -> dict[str, Operator]:
    found, refused = find_operators(HloModule.from_text(STEP), key_of)
    assert refused == ()
    return {str(o.key).split()[1]: o for o in found}


def placeholder(program: Program) -> bytes:
    lines = [f"p{n} = {b.element_type}[{b.elements}] parameter({n})" for n, b in enumerate(program.buffers)]
    body = "\n".join([*lines, "zero = f32[] constant(0)", "ROOT root = f32[1] broadcast(zero), dimensions={}"])
    text = f"HloModule {placeholder_name(program)}, num_partitions=4\nENTRY main {{\n{body}\n}}"
    return HloModule.from_text(text).to_bytes()


def with_calls(*items: Item) -> HloModule | None:
    """The placeholder after the pass, which the pass manager has verified; None if the pass changed nothing."""
    program = Program(items, 2)
    manager = PassManager([LibraryCalls(program)], strict=True)
    result, _ = manager.run(Stage.PRE_SCHEDULER, placeholder(program))
    return None if result is None else HloModule.from_bytes(result)


def calls(module: HloModule | None) -> list[Instruction]:
    assert module is not None
    return [i for i in module.entry.instructions if i.opcode == "custom-call"]


def needed(module: HloModule) -> set[Instruction]:
    """All instructions that the result depends on."""
    found, new = set(), [module.entry.root]
    while new:
        instruction = new.pop()
        if instruction not in found:
            found.add(instruction)
            new += instruction.operands
    return found


def test_a_call_is_as_in_the_step_but_for_its_workspace(operators: dict[str, Operator]) -> None:
    (call,) = calls(with_calls(Item(operators["forward"])))
    original = operators["forward"].core.proto
    assert call.proto.custom_call_target == original.custom_call_target
    assert call.proto.backend_config == original.backend_config
    assert shapes.text(call.shape).replace(" ", "") == "(bf16[1,256,8,64],f32[1,8,256],u8[0])"
    assert not call.op_name


def test_calls_are_kept_alive_and_the_result_has_its_shape(operators: dict[str, Operator]) -> None:
    module = with_calls(Item(operators["forward"]), Item(operators["backward"]))
    assert module is not None
    assert set(calls(module)) <= needed(module)
    assert shapes.text(module.entry.root.shape) == "f32[1]"


def test_calls_read_the_arguments_in_the_shapes_of_the_step(operators: dict[str, Operator]) -> None:
    forward, backward = calls(with_calls(Item(operators["forward"]), Item(operators["backward"])))
    q, k, v = forward.operands
    assert k is v and q is not k
    for value in {*forward.operands, *backward.operands}:
        assert (value.opcode, value.operands[0].opcode) == ("reshape", "parameter")
    read = [value.operands[0] for value in dict.fromkeys(backward.operands)]
    assert len(set(read)) == len(read) == 4  # no two inputs share an argument
    assert {q.operands[0], k.operands[0]} <= set(read)  # but two calls do


def test_constants_stay_and_indices_are_zero(operators: dict[str, Operator]) -> None:
    (call,) = calls(with_calls(Item(operators["padded"])))
    lengths, seed = call.operands[3:]
    assert list(lengths.proto.literal.s32s) == [256, 100]
    assert (shapes.text(seed.shape), list(seed.proto.literal.s64s)) == ("s64[]", [0])


def test_a_call_inside_an_async_pair_stands_bare(operators: dict[str, Operator]) -> None:
    (call,) = calls(with_calls(Item(operators["started"])))
    one, same, other = call.operands
    assert one is same and other is not one


def test_each_operator_is_put_in_once_and_others_not_at_all(operators: dict[str, Operator]) -> None:
    forward, gemm, moved = (operators[name] for name in ("forward", "gemm", "moved"))
    module = with_calls(Item(gemm), Item(forward, gemm), Item(forward), Item(moved, forward), Item(forward, forward))
    assert [c.proto.custom_call_target for c in calls(module)] == ["__cudnn$fmhaSoftmax"]


def test_without_attention_the_placeholder_stays_as_it_is(operators: dict[str, Operator]) -> None:
    assert with_calls(Item(operators["gemm"]), Item(operators["moved"], operators["gemm"])) is None


def test_a_replayed_call_has_the_workspace_that_xla_gave_it(operators: dict[str, Operator]) -> None:
    """A step compiled without a GPU has a workspace of size 0, for which cuDNN would find no graph."""
    module = with_calls(Item(operators["forward"]))
    assert module is not None
    (call,) = calls(module)
    call.shape.tuple_shapes[-1].dimensions[0] = 4096
    template = bring(module, operators["forward"], library_workspaces(module.entry))
    assert shapes.text(template.core.shape).replace(" ", "") == "(bf16[1,256,8,64],f32[1,8,256],u8[4096])"
    other = bring(module, operators["backward"], library_workspaces(module.entry))
    assert shapes.same(other.core.shape, operators["backward"].core.shape)
