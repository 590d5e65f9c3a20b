"""The memory of a step over time, and which of it is residual."""

import pytest

from dhelix.launch.inspect.answers import memory
from dhelix.launch.inspect.answers.memory import memory_over_time, moments
from dhelix.launch.shown.instruction_words import Words
from dhelix.passes.hlo import HloModule

KIB = 2**10
STRAIGHT = """
HloModule jit_step, is_scheduled=true

ENTRY main {
  x = f32[256] parameter(0)
  kept = f32[256] tanh(x), metadata={op_name="jit(step)/jvp(f)/tanh"}
  big = f32[1024] broadcast(kept), dimensions={}, metadata={op_name="jit(step)/jvp(f)/broadcast"}
  y = f32[256] slice(big), slice={[0:256]}, metadata={op_name="jit(step)/jvp(f)/slice"}
  g = f32[256] multiply(y, kept), metadata={op_name="jit(step)/transpose(jvp(f))/mul"}
  ROOT out = f32[256] add(g, g), metadata={op_name="jit(step)/transpose(jvp(f))/add"}
}
"""
SCANNED = """
HloModule jit_step, is_scheduled=true

forward {
  s = (s32[], f32[256], f32[4,256]) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  next = s32[] add(n, one)
  h = f32[256] get-tuple-element(s), index=1
  stack = f32[4,256] get-tuple-element(s), index=2
  t = f32[256] tanh(h), metadata={op_name="jit(step)/jvp(f)/tanh"}
  row = f32[1,256] bitcast(t)
  zero = s32[] constant(0)
  put = f32[4,256] dynamic-update-slice(stack, row, n, zero), metadata={op_name="jit(step)/jvp(f)/dynamic_update_slice"}
  ROOT r = (s32[], f32[256], f32[4,256]) tuple(next, t, put)
}

backward {
  s = (s32[], f32[256], f32[4,256], f32[256]) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  next = s32[] add(n, one)
  g = f32[256] get-tuple-element(s), index=1
  stack = f32[4,256] get-tuple-element(s), index=2
  sum = f32[256] get-tuple-element(s), index=3
  zero = s32[] constant(0)
  row = f32[1,256] dynamic-slice(stack, n, zero), dynamic_slice_sizes={1,256}, metadata={op_name="jit(step)/transpose(jvp(f))/dynamic_slice"}
  flat = f32[256] bitcast(row)
  m = f32[256] multiply(g, flat), metadata={op_name="jit(step)/transpose(jvp(f))/mul"}
  add = f32[256] add(sum, m), metadata={op_name="jit(step)/transpose(jvp(f))/add_any"}
  ROOT r = (s32[], f32[256], f32[4,256], f32[256]) tuple(next, m, stack, add)
}

less { p = (s32[], f32[256], f32[4,256]) parameter(0)  k = s32[] get-tuple-element(p), index=0  c = s32[] constant(4)  ROOT l = pred[] compare(k, c), direction=LT }
less2 { p = (s32[], f32[256], f32[4,256], f32[256]) parameter(0)  k = s32[] get-tuple-element(p), index=0  c = s32[] constant(4)  ROOT l = pred[] compare(k, c), direction=LT }

ENTRY main {
  x = f32[256] parameter(0)
  c0 = s32[] constant(0)
  zf = f32[] constant(0)
  stack = f32[4,256] broadcast(zf), dimensions={}
  h = f32[256] copy(x)
  i = s32[] copy(c0)
  t0 = (s32[], f32[256], f32[4,256]) tuple(i, h, stack)
  w0 = (s32[], f32[256], f32[4,256]) while(t0), condition=less, body=forward
  saved = f32[4,256] get-tuple-element(w0), index=2
  last = f32[256] get-tuple-element(w0), index=1
  sums = f32[256] broadcast(zf), dimensions={}
  j = s32[] copy(c0)
  t1 = (s32[], f32[256], f32[4,256], f32[256]) tuple(j, last, saved, sums)
  w1 = (s32[], f32[256], f32[4,256], f32[256]) while(t1), condition=less2, body=backward
  ROOT out = f32[256] get-tuple-element(w1), index=3
}
"""  # noqa: E501 (HLO)


def test_peak_and_what_lives_there() -> None:
    found = memory_over_time(HloModule.from_text(STRAIGHT), Words())
    assert found.arguments == KIB
    assert [point.bytes // KIB for point in found.points] == [1, 2, 6, 7, 4, 3]
    assert found.peak.instruction == "y"
    assert [(one.instruction, one.shape, one.bytes // KIB, one.residual) for one in found.living] == [
        ("big", "f32[1024]", 4, False),
        ("kept", "f32[256]", 1, True),
        ("y", "f32[256]", 1, True),
    ]
    assert found.residuals == 2 * KIB


def test_residuals_of_scanned_layers() -> None:
    """The stack is written by the forward loop and read by the backward loop. The sum is only the backward's."""
    found = memory_over_time(HloModule.from_text(SCANNED), Words())
    residual = {one.instruction: one.residual for one in found.living if one.bytes >= KIB}
    assert found.peak.instruction == "w1"
    assert residual == {"stack.2": True, "h.1": True, "sums": False}
    assert next(one.shape for one in found.living if one.instruction == "stack.2") == "f32[4,256]"


def test_memory_over_time_also_inside_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LEAST", KIB)
    found = moments(HloModule.from_text(SCANNED))
    # The stack and the last layer's value are written in one loop and read in the other. Both live inside the loops.
    assert found["w0"].residuals == found["t"].residuals == found["m"].residuals == 5 * KIB
    assert found["c0"].residuals == 0
    whole = memory_over_time(HloModule.from_text(SCANNED), Words())
    assert max(moment.bytes for moment in found.values()) == whole.peak.bytes
