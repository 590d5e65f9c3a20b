"""Small scheduled programs for tests of timelines and schedulers, given as lists or drawn at random.

An operation is compute (`Op`) or a pair (`Start`, `Done`). Values are arrays of any size. An operation in place
overwrites its first operand, which nothing may read after it. `runs_rightly` executes an order symbolically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from hypothesis import strategies as st

from dhelix.passes.analysis.collectives import is_done, is_start, start_of
from dhelix.passes.evaluation.roofline_costs import FREE, Cost, Lane
from dhelix.passes.hlo import HloModule, Instruction

PERMUTING_LOOP = """body {
  n = (s32[], f32[2]) parameter(0)
  i = s32[] get-tuple-element(n), index=0
  v = f32[2] get-tuple-element(n), index=1
  start = (f32[2], f32[2]) collective-permute-start(v), channel_id=1, source_target_pairs={{0,1},{1,0}}
  w = f32[2] negate(v)
  done = f32[2] collective-permute-done(start)
  sum = f32[2] add(w, done)
  ROOT r = (s32[], f32[2]) tuple(i, sum)
}
condition {
  n = (s32[], f32[2]) parameter(0)
  i = s32[] get-tuple-element(n), index=0
  k = s32[] constant(5)
  ROOT more = pred[] compare(i, k), direction=LT
}
"""
"""A loop body with a pair in it, and its condition; to be followed by an entry computation."""


def temporaries(compiled: jax.stages.Compiled) -> int:
    """Bytes of memory that the compiler allocates in addition to arguments and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@dataclass(frozen=True)
class Op:
    """Compute that takes `seconds` and makes `size` floats from `operands`."""

    name: str
    seconds: float
    operands: tuple[str, ...] = ()
    size: int = 1
    in_place: bool = False


@dataclass(frozen=True)
class Start:
    """A collective that takes `seconds`. Its done is named `<name>_done` and makes `size` floats."""

    name: str
    seconds: float
    operand: str
    size: int = 1
    lane: Lane = Lane.COMM
    between_nodes: bool = False


@dataclass(frozen=True)
class Done:
    start: str


Program = Sequence[Op | Start | Done]


def build(program: Program, results: Sequence[str]) -> tuple[HloModule, dict[Instruction, Cost]]:
    """A scheduled module with one parameter `p`, and the costs of its instructions."""
    sizes = {"p": 1}
    lines = ["p = f32[1] parameter(0)"]
    starts = {}
    for step in program:
        if isinstance(step, Done):
            start = starts[step.start]
            sizes[f"{start.name}_done"] = start.size
            lines.append(f"{start.name}_done = f32[{start.size}] collective-permute-done({start.name})")
        elif isinstance(step, Start):
            starts[step.name] = step
            shape = f"(f32[{sizes[step.operand]}], f32[{step.size}])"
            pairs = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
            lines.append(f"{step.name} = {shape} collective-permute-start({step.operand}), {pairs}")
        else:
            sizes[step.name] = sizes[step.operands[0]] if step.in_place else step.size
            alias = ", output_to_operand_aliasing={{}: (0, {})}" if step.in_place else ""
            lines.append(
                f"{step.name} = f32[{sizes[step.name]}] custom-call({', '.join(step.operands)}), "
                f'custom_call_target="work"{alias}'
            )
    shapes = ", ".join(f"f32[{sizes[r]}]" for r in results)
    lines.append(f"ROOT result = ({shapes}) tuple({', '.join(results)})")
    text = "HloModule m, is_scheduled=true\nENTRY e {\n" + "\n".join(f"  {line}" for line in lines) + "\n}"
    module = HloModule.from_text(text)
    given: dict[str, Cost] = {}
    for step in program:
        if isinstance(step, Op):
            given[step.name] = Cost(step.seconds)
        elif isinstance(step, Start):
            given[step.name] = Cost(step.seconds, lane=step.lane, between_nodes=step.between_nodes)
    return module, {i: given.get(i.name, FREE) for i in module.entry.instructions}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[str]]:
    """A program and its results: up to 14 operations, with pairs, various sizes and updates in place."""
    program: list[Op | Start | Done] = []
    readable = ["p"]
    under_way: list[Start] = []
    seconds = st.integers(1, 8).map(float)
    for n in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["op", "op", "op", "start", "start", "done", "in place"]))
        if kind == "done" and under_way:
            start = under_way.pop(draw(st.integers(0, len(under_way) - 1)))
            program.append(Done(start.name))
            readable.append(f"{start.name}_done")
        elif kind == "start":
            lane = draw(st.sampled_from([Lane.COMM, Lane.COMM, Lane.COMM_2]))
            start = Start(f"c{n}", draw(seconds), draw(st.sampled_from(readable)), draw(st.integers(1, 4)), lane)
            under_way.append(start)
            program.append(start)
        else:
            operands = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=3, unique=True))
            free = [v for v in readable if v != "p" and all(s.operand != v for s in under_way)]
            in_place = kind == "in place" and bool(free)
            if in_place:
                target = draw(st.sampled_from(free))
                operands = [target, *(o for o in operands if o != target)]
                readable.remove(target)
            program.append(Op(f"x{n}", draw(seconds), tuple(operands), draw(st.integers(1, 4)), in_place))
            readable.append(f"x{n}")
    for start in under_way:
        program.append(Done(start.name))
        readable.append(f"{start.name}_done")
    return program, readable


def runs_rightly(program: Program, order: Sequence[Instruction]) -> bool:
    """True if every operand holds its value when it is read, and until a collective that reads it ends."""
    in_place = {s.name for s in program if isinstance(s, Op) and s.in_place}
    dead: set[str] = set()
    reading: dict[str, str] = {}
    for instruction in order:
        if is_done(instruction):
            del reading[start_of(instruction).name]
            continue
        if any(o.name in dead for o in instruction.operands):
            return False
        if is_start(instruction):
            reading[instruction.name] = instruction.operands[0].name
        elif instruction.name in in_place:
            target = instruction.operands[0].name
            if target in reading.values():
                return False
            dead.add(target)
    return True
