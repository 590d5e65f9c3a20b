"""Fingerprints change with what matters, and with nothing else."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from dhelix.errors import DhelixError
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.manager import Stage
from dhelix.passes.hlo import HloModule

TEXT = """HloModule jit_step

ENTRY main {
  p = f32[4]{0} parameter(0), metadata={op_name="jit(step)/x" source_file="/home/a/train.py" source_line=3}
  ROOT n = f32[4]{0} negate(p)
}
"""

COLLECTIVES = """HloModule jit_step, is_scheduled=true

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}

body {
  state = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  v = f32[8]{0} get-tuple-element(state), index=1
  r = f32[8]{0} all-reduce(v), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=add
  ROOT out = (s32[], f32[8]) tuple(i, r)
}

condition {
  held = (s32[], f32[8]) parameter(0)
  j = s32[] get-tuple-element(held), index=0
  bound = s32[] constant(3)
  ROOT less = pred[] compare(j, bound), direction=LT
}

ENTRY main {
  p = f32[8]{0} parameter(0)
  zero = s32[] constant(0)
  first = f32[8]{0} all-to-all(p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  second = f32[8]{0} collective-permute(p), channel_id=3, source_target_pairs={{0,1},{1,0}}
  sum = f32[8]{0} add(first, second)
  start = (s32[], f32[8]) tuple(zero, sum)
  loop = (s32[], f32[8]) while(start), condition=condition, body=body
  ROOT result = f32[8]{0} get-tuple-element(loop), index=1
}
"""


class Order(enum.Enum):
    LIST = 1


@dataclass(frozen=True)
class Options:
    name: ClassVar[str] = "options"
    stage: ClassVar[Stage] = Stage.LOWERED
    depth: int = 1
    lanes: frozenset[str] = frozenset({"compute", "copy", "communication"})
    order: Order = Order.LIST


@dataclass(frozen=True)
class Opaque:
    name: ClassVar[str] = "opaque"
    stage: ClassVar[Stage] = Stage.LOWERED
    thing: object = None


def module(text: str = TEXT) -> bytes:
    return HloModule.from_text(text).to_bytes()


def of_collectives(text: str) -> str:
    return fingerprint.collective_fingerprint(HloModule.from_text(text))


def test_marker_round_trip() -> None:
    marked = fingerprint.mark("jit_step", "0123456789abcdef")
    assert marked == "jit_step__dhelix_0123456789abcdef"
    assert fingerprint.unmark(marked) == "jit_step"
    assert fingerprint.mark(marked, "f" * 16) == "jit_step__dhelix_" + "f" * 16
    assert fingerprint.marker_of(module(TEXT.replace("jit_step", marked))) == "0123456789abcdef"


@pytest.mark.parametrize("data", [module(), b"", b"\x0a", b"\x0b\xff", b"\xff" * 20, b"\x0a\x7fshort"])
def test_no_marker_no_error(data: bytes) -> None:
    assert fingerprint.marker_of(data) is None


def test_marker_is_found_where_the_name_does_not_stand_first() -> None:
    name = fingerprint.mark("jit_step", "0123456789abcdef").encode()
    assert fingerprint.marker_of(b"\x28\x96\x01\x12\x04main\x0a" + bytes([len(name)]) + name) == "0123456789abcdef"


def test_inputs_change_the_fingerprint() -> None:
    inputs = [
        fingerprint.input_fingerprint([Options()], module()),
        fingerprint.input_fingerprint([Options(depth=2)], module()),
        fingerprint.input_fingerprint([Options(), Opaque()], module()),
        fingerprint.input_fingerprint([Opaque(), Options()], module()),
        fingerprint.input_fingerprint([Options()], module(TEXT.replace("negate", "cosine"))),
        fingerprint.input_fingerprint([Options()], module(), profile={"gemm": 1.5}),
        fingerprint.input_fingerprint([Options()], module(), profile=b"gemm 1.5"),
        fingerprint.input_fingerprint([Options()]),
    ]
    assert len(set(inputs)) == len(inputs)
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in inputs)


def test_versions_change_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint.input_fingerprint([Options()])
    monkeypatch.setattr(fingerprint, "versions", lambda: {"jax": "0.99"})
    assert fingerprint.input_fingerprint([Options()]) != before
    monkeypatch.undo()
    assert set(fingerprint.versions()) == {"dhelix", "jax", "jaxlib", "dhelix sources"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("HloModule jit_step", "HloModule jit_step__dhelix_0123456789abcdef"),
        ("/home/a/train.py", "/home/b/train.py"),
        ("source_line=3", "source_line=30"),
    ],
)
def test_name_and_source_lines_are_no_content(old: str, new: str) -> None:
    assert old in TEXT
    assert fingerprint.module_fingerprint(module(TEXT.replace(old, new))) == fingerprint.module_fingerprint(module())


def test_plain_values() -> None:
    value = {"b": (np.int64(2), np.array([1.5])), "a": {Order.LIST}, 3: None}
    assert fingerprint.plain(value) == {"3": None, "a": ["LIST"], "b": [2, [1.5]]}


def test_an_option_without_text_form_is_refused() -> None:
    with pytest.raises(DhelixError, match="object has no stable text form"):
        fingerprint.input_fingerprint([Opaque(object())])


def test_another_process_finds_the_same() -> None:
    script = (
        "from tests.passes.framework.test_fingerprint import *\n"
        "print(fingerprint.input_fingerprint([Options()], module(), {'y': 1, 'x': {'b', 'a'}}))"
    )
    here = fingerprint.input_fingerprint([Options()], module(), {"x": {"a", "b"}, "y": 1})
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONHASHSEED": "7",
        "JAX_PLATFORMS": "cpu",
    }
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == here


def test_collective_order_goes_through_loops() -> None:
    lines = fingerprint.collective_order(HloModule.from_text(COLLECTIVES))
    assert [line.split()[0] for line in lines] == ["all-to-all", "collective-permute", "all-reduce"]
    assert "f32[8]" in lines[2] and "channel=2" in lines[2]


def test_collective_order_is_that_of_the_schedule() -> None:
    first, second = (line for line in COLLECTIVES.splitlines() if "channel_id=1" in line or "channel_id=3" in line)
    swapped = COLLECTIVES.replace(f"{first}\n{second}", f"{second}\n{first}")
    assert swapped != COLLECTIVES
    assert of_collectives(swapped) != of_collectives(COLLECTIVES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{{0,1},{2,3}}", "{{0,2},{1,3}}"),
        ("{{0,1},{2,3}}", "[2,2]<=[4]"),
        ("[2,2]<=[4]", "[2,2]<=[2,2]T(1,0)"),
        ("{{0,1},{1,0}}", "{{0,1}}"),
        ("channel_id=2", "channel_id=5"),
    ],
)
def test_what_a_collective_does_counts(old: str, new: str) -> None:
    before = COLLECTIVES if old in COLLECTIVES else COLLECTIVES.replace("{{0,1},{2,3}}", old)
    after = before.replace(old, new)
    assert before != after
    assert of_collectives(after) != of_collectives(before)


def test_a_missing_collective_counts() -> None:
    reduce = next(line for line in COLLECTIVES.splitlines() if "all-reduce(" in line)
    text = COLLECTIVES.replace(reduce, "").replace("tuple(i, r)", "tuple(i, v)")
    assert of_collectives(text) != of_collectives(COLLECTIVES)


def test_names_and_compute_do_not_count() -> None:
    text = COLLECTIVES.replace("second", "other").replace("add(first", "multiply(first")
    assert text != COLLECTIVES
    assert of_collectives(text) == of_collectives(COLLECTIVES)
