"""XLA's parser in a process of its own: it may crash, hang or eat memory, and the next text is parsed all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import parser_process
from dhelix.launch.inspect.reading.parser_process import ParserProcess, ParserStopped
from dhelix.passes import jax_compat
from dhelix.passes.hlo import HloModule

TEXT = "HloModule m\n\nENTRY e {\n  p = f32[8]{0} parameter(0)\n  ROOT a = f32[8]{0} add(p, p)\n}\n"


@pytest.fixture
def parser() -> Iterator[ParserProcess]:
    parser = ParserProcess()
    yield parser
    parser.stop()


def opcodes(parser: ParserProcess) -> list[str]:
    return [i.opcode for i in HloModule(parser.parse(TEXT), "").entry.instructions]


def test_one_process_parses_many_texts(parser: ParserProcess) -> None:
    assert opcodes(parser) == ["parameter", "add"]
    first = parser._process
    with pytest.raises(DhelixError, match="Unknown opcode: plus"):
        parser.parse(TEXT.replace("add", "plus"))
    assert opcodes(parser) == ["parameter", "add"] and parser._process is first


def test_a_crash_is_told_with_xlas_reason_and_the_next_text_is_parsed(parser: ParserProcess) -> None:
    with pytest.raises(ParserStopped, match="^param_no >= 0 && param_no < parameter_count"):
        parser.parse(TEXT.replace("parameter(0)", "parameter(7)"))
    assert opcodes(parser) == ["parameter", "add"]


def test_memory_is_limited(parser: ParserProcess) -> None:
    huge = TEXT.replace("p = ", "c = f32[100000,100000]{1,0} constant({...})\n  p = ")
    with pytest.raises(DhelixError, match="memory|RESOURCE_EXHAUSTED"):
        parser.parse(huge)
    assert opcodes(parser) == ["parameter", "add"]


def test_time_is_limited(parser: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_compat, "TEXT_PARSER", "import time; time.sleep(1000)")
    monkeypatch.setattr(parser_process, "_SECONDS", 0.5)
    with pytest.raises(ParserStopped, match="^it takes more than 1 s$|^it takes more than 0 s$"):
        parser.parse(TEXT)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("print('F0000 a.cc:1] Check failed: number < count ', file=sys.stderr); os.abort()", "^number < count$"),
        ("print('terminate called after std::bad_alloc', file=sys.stderr); os.abort()", "^it needs more than 1.0 GiB"),
        ("os.kill(os.getpid(), 11)", "^Segmentation fault$"),
        ("sys.exit(9)", "^exit status 9$"),
    ],
)
def test_the_last_word_of_a_parser_that_stops(
    end: str, message: str, parser: ParserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_compat, "TEXT_PARSER", f"import os, sys\n{end}")
    with pytest.raises(ParserStopped, match=message):
        parser.parse(TEXT)
