"""Content: fusions that differ in names alone have the same, and any other difference shows."""

from collections.abc import Hashable

import pytest

from dhelix.passes.analysis.content import Contents
from dhelix.passes.hlo import HloModule, Instruction

MODULE = """HloModule m

first {
  a = f32[8] parameter(0)
  b = f32[8] parameter(1)
  ROOT c = f32[8] subtract(a, b), metadata={op_name="jit(step)/layer_0/sub"}
}

second {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  ROOT z = f32[8] subtract(OPERANDS), metadata={op_name="jit(step)/layer_1/sub"}
}

ENTRY main {
  p = f32[8] parameter(0)
  q = f32[8] parameter(1)
  f = f32[8] fusion(p, q), kind=kLoop, calls=first
  ROOT g = f32[8] fusion(p, f), kind=KIND, calls=second
}
"""


def fusions(operands: str = "x, y", kind: str = "kLoop", size: str = "8") -> list[Instruction]:
    text = MODULE.replace("OPERANDS", operands).replace("KIND", kind).replace("f32[8]", f"f32[{size}]")
    module = HloModule.from_text(text)
    return [i for i in module.entry.instructions if i.opcode == "fusion"]


def test_names_do_not_count() -> None:
    contents = Contents()
    first, second = fusions()
    assert contents[first] == contents[second]
    known: dict[Hashable, str] = {}
    assert {contents.once(fusion, known, lambda i: i.name) for fusion in (first, second)} == {first.name}


@pytest.mark.parametrize("other", [{"operands": "y, x"}, {"operands": "x, x"}, {"kind": "kInput"}])
def test_all_else_counts(other: dict[str, str]) -> None:
    contents = Contents()
    first, second = fusions(**other)
    assert contents[first] != contents[second]


def test_shapes_count() -> None:
    contents = Contents()
    (first, _), (wide, _) = fusions(), fusions(size="16")
    assert contents[first] != contents[wide]


def test_only_fusions_are_made_once() -> None:
    parameter = fusions()[0].operands[0]
    assert Contents().once(parameter, {}, lambda i: i.name) == "p"
