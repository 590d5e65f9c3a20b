"""Linear time on one core: 100,000 instructions, 10,000 computations, 5,000 calls, long lists of copies."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from dhelix.passes.hlo import Builder, Computation, HloModule, graph, verify
from dhelix.passes.hlo.edit import copy_computation, drop_dead, inline_calls
from dhelix.tests.machine import slowness
from dhelix.tests.passes.hlo.modules import VECTOR, base
from dhelix.tests.quick import slow_but


def one_long_computation(count: int) -> HloModule:
    module = base()
    builder = Builder(module.entry)
    values = [module.entry.root, module.entry.root]
    for _ in range(count):
        values.append(builder.binary("add", values[-1], values[-2]))
    module.entry.root = values[-1]
    return module


def many_computations(count: int, size: int) -> HloModule:
    """A chain of calls, each of its own function."""
    module = base()
    entry = Builder(module.entry)
    value = module.entry.root
    for _ in range(count):
        function = Builder(module.new_computation("function"))
        inner = function.parameter(0, VECTOR)
        for _ in range(size - 1):
            inner = function.binary("add", inner, inner)
        value = entry.make("call", VECTOR, [value], called=[function.finish(inner)])
    module.entry.root = value
    return module


def nested_calls(depth: int, size: int) -> HloModule:
    """Functions that each call the next one; inlining must copy each body once, not once per level."""
    module = base()
    function: Computation | None = None
    for _ in range(depth):
        builder = Builder(module.new_computation("function"))
        value = builder.parameter(0, VECTOR)
        for _ in range(size):
            value = builder.binary("add", value, value)
        if function is not None:
            value = builder.make("call", VECTOR, [value], called=[function])
        function = builder.finish(value)
    assert function is not None
    module.entry.root = Builder(module.entry).make("call", VECTOR, [module.entry.root], called=[function])
    return module


def seconds(action: Callable[[], object]) -> float:
    """CPU seconds of this process, so that other load and garbage collection do not count."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    try:
        action()
        return time.process_time() - start
    finally:
        gc.enable()


def read_check_write(source: bytes) -> HloModule:
    module = HloModule.from_bytes(source)
    verify(module)
    module.entry.root.proto.metadata.op_name = "changed"
    assert module.to_bytes() != source
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: one_long_computation(100_000),
        pytest.param(lambda: many_computations(10_000, 4), marks=pytest.mark.slow),
    ],
    ids=["one long computation", "many computations"],
)
def test_parsing_verifying_and_writing_a_large_module(make: Callable[[], HloModule]) -> None:
    source = make().to_bytes()
    assert HloModule.from_bytes(source).instruction_count >= 50_000
    start = time.process_time()
    read_check_write(source)
    assert time.process_time() - start < 4 * slowness()


def grows(make: Callable[[int], HloModule], action: Callable[[HloModule], object], size: int) -> float:
    """Time for four times the size, relative to `size`: 4 if linear, 16 if quadratic."""
    small, large = make(size), make(4 * size)
    return seconds(lambda: action(large)) / max(seconds(lambda: action(small)), 1e-3)


def reorder(module: HloModule) -> None:
    """Sorts the worst order: every operand after its user."""
    module.entry.instructions.reverse()
    module.computations.reverse()
    module.to_bytes()


EDITS: dict[str, tuple[Callable[[int], HloModule], Callable[[HloModule], object]]] = {
    "inline": (lambda n: many_computations(n // 4, 4), lambda m: inline_calls(m.entry)),
    "inline nested": (lambda n: nested_calls(n // 100, 100), lambda m: inline_calls(m.entry)),
    "copy": (lambda n: many_computations(n // 4, 4), lambda m: copy_computation(m.entry)),
    "sort": (one_long_computation, reorder),
    "sort computations": (lambda n: many_computations(n // 2, 2), reorder),
    "names": (lambda n: many_computations(n // 4, 4), lambda m: [m.unique_name("x") for _ in m.computations]),
    "dead code": (one_long_computation, lambda m: drop_dead(m.entry)),
    "users": (one_long_computation, lambda m: (m.entry.users(), graph.ancestors(m.entry, [m.entry.root]))),
}


SIBLINGS = {"inline nested", "sort computations"}  # of "inline" and "sort"


@pytest.mark.parametrize("edit", slow_but(EDITS.keys() - SIBLINGS, EDITS))
def test_edits_are_linear(edit: str) -> None:
    make, action = EDITS[edit]
    assert any(grows(make, action, 4_000) < 9 for _ in range(3))  # a busy machine gets another try


def test_inlining_five_thousand_calls() -> None:
    module = many_computations(5_000, 4)
    assert seconds(lambda: inline_calls(module.entry)) < 2 * slowness()
    assert len(module.clone().computations) == 1
