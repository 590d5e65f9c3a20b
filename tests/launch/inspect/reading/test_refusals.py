"""Refused modules: the message says what it means and what to do, and XLA's reason comes last."""

from pathlib import Path

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import dumps, refusals

TEXT = """HloModule m, is_scheduled=true

ENTRY e {
  p = f32[8]{0} parameter(0)
  a = f32[8]{0} add(p, p)
  b = f32[8]{0} multiply(a, p)
  ROOT c = f32[8]{0} add(b, a)
}
"""
LATER = TEXT.replace("multiply(a, p)", "multiply(d, p)").replace("  ROOT c", "  %d = f32[8]{0} negate(p)\n  ROOT c")
NOT_AFTER = (
    "INTERNAL: RET_CHECK failure (external/xla/hlo/ir/hlo_schedule.cc:456) instruction_position.at(operand) < "
    "instruction_position.at(instruction) Instruction dot.1 is not scheduled after its operand x"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LATER, "order of its lines: line 6 needs d, but line 7 makes it; put line 7 above line 6, or dump it again"),
        (f"log\nlog\n{LATER}", "line 8 needs d, but line 9 makes it; put line 9 above line 8"),
        (
            TEXT.replace("a = f32[8]{0} add(p, p)", "a = f32[8]{0} negate(p), control-predecessors={b}"),
            "line 5 needs b, but line 6 makes it",
        ),
        (TEXT.replace("multiply(a, p)", "multiply(d, p)"), "lacks a line: line 6 needs d, which no line of its"),
        (
            LATER.replace("  %d =", "}\n\nother {\n  p2 = f32[8]{0} parameter(0)\n  %d ="),  # of another computation
            "lacks a line: line 6 needs d",
        ),
        (
            TEXT.replace("parameter(0)", "parameter(7)"),
            "not a valid module: XLA's parser stops, so it is damaged, or too large; dump with",
        ),
    ],
)
def test_a_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (file := tmp_path / "x.txt").write_text(text)
    with pytest.raises(DhelixError) as error:
        dumps.read(file)
    assert message in str(error.value)
    assert str(error.value).endswith(")")  # XLA's reason


@pytest.mark.parametrize(
    ("said", "begin", "end"),
    [
        (
            refusals.of_module(NOT_AFTER, "dump it again"),
            "its schedule, the order of its instructions, cannot run, so nothing can be estimated; dump it again",
            "(XLA: Instruction dot.1 is not scheduled after its operand x)",
        ),
        (
            refusals.of_module("INVALID_ARGUMENT: bad", "dump it again"),
            "jaxlib ",
            "dump it again (XLA: INVALID_ARGUMENT: bad)",
        ),
        (
            refusals.of_stopped("it takes more than 60 s", "copy it"),
            "XLA's parser stops, so it is damaged, or too large; copy",
            "60 s)",
        ),
        (refusals.of_verified("schedule of e lacks c", "copy it"), "its schedule", "; copy it (schedule of e lacks c)"),
        (refusals.of_verified("a: the name is taken", "copy it"), "a: the name is taken; copy it", ""),
    ],
)
def test_what_it_means_comes_first(said: str, begin: str, end: str) -> None:
    assert said.startswith(begin) and said.endswith(end)
