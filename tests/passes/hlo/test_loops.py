"""Trip counts, invariants and counters of loops: proved with XLA's integer arithmetic, or not at all."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import Builder, HloModule, WhileLoop, shapes, verify
from dhelix.tests.machine import slowness
from dhelix.tests.passes.hlo.modules import VECTOR, loop

U32, S32, S64 = shapes.U32, shapes.S32, shapes.S64
MAX_S32, MAX_U32 = (1 << 31) - 1, (1 << 32) - 1

COUNTS: dict[str, tuple[dict[str, Any], int | None]] = {
    "up": (dict(start=0, bound=7, step=1), 7),
    "up from 3": (dict(start=3, bound=7, step=1), 4),
    "up by 2": (dict(start=0, bound=7, step=2), 4),
    "up by 3": (dict(start=0, bound=7, step=3), 3),
    "up to and with": (dict(start=0, bound=7, step=1, direction="LE"), 8),
    "until equal": (dict(start=0, bound=6, step=2, direction="NE"), 3),
    "while equal": (dict(start=6, bound=6, step=2, direction="EQ"), 1),
    "down": (dict(start=7, bound=0, step=-1, direction="GT"), 7),
    "down to and with": (dict(start=7, bound=0, step=-2, direction="GE"), 4),
    "down by subtraction": (dict(start=7, bound=0, step=3, direction="GT", operation="subtract"), 3),
    "doubling": (dict(start=1, bound=100, step=2, operation="multiply"), 7),
    "none": (dict(start=7, bound=7, step=1), 0),
    "none, from beyond": (dict(start=9, bound=7, step=1), 0),
    "64 bits": (dict(start=1 << 40, bound=(1 << 40) + 5, step=1, element_type=S64), 5),
    "unsigned": (dict(start=0, bound=5, step=1, element_type=U32), 5),
    "unsigned wraps": (dict(start=2, bound=3, step=MAX_U32, direction="LT", element_type=U32), 3),
    "unsigned wraps past zero": (
        dict(start=2, bound=MAX_U32, step=1, direction="NE", element_type=U32, operation="subtract"),
        3,
    ),
    "signed wraps": (dict(start=MAX_S32 - 1, bound=0, step=1, direction="GT"), 2),
    "never ends": (dict(start=0, bound=7, step=0), None),
    "bound in the state": (dict(start=0, bound=7, step=1, bound_in_state=True), 7),
    "condition through a call": (dict(start=0, bound=7, step=2, condition_calls=True), 4),
    "both": (dict(start=0, bound=7, step=2, condition_calls=True, bound_in_state=True), 4),
    "long": (dict(start=0, bound=MAX_S32, step=1), MAX_S32),
    "long, down by 2": (dict(start=MAX_S32 - 1, bound=-MAX_S32, step=-2, direction="GE"), MAX_S32),
    "long, through a call": (dict(start=0, bound=10**9, step=3, condition_calls=True), (10**9 + 2) // 3),
    "until equal, past it": (dict(start=0, bound=MAX_S32, step=2, direction="NE"), None),
    "dynamic bound": (dict(start=0, bound=None, step=1), None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_trip_counts(name: str) -> None:
    options, count = COUNTS[name]
    made = loop(**options)
    verify(made.computation.module)
    view = WhileLoop(made)
    assert view.trip_count == count
    assert view.induction_index == 0
    assert view.invariants == {2}
    assert view.size == 3
    dynamic = options["bound"] is None or options.get("bound_in_state")
    assert view.condition_indices == ({0, 2} if dynamic else {0})


def test_initial_values_are_named() -> None:
    made = loop(3, 7, 1)
    assert [i.opcode for k in range(3) if (i := WhileLoop(made).initial(k))] == [
        "constant",
        "parameter",
        "constant",
    ]
    fence = Builder(made.computation).make("opt-barrier", made.shape, made.operands)
    made.operands = [fence]
    view = WhileLoop(made)
    assert view.initial(0) is None and view.trip_count is None


def test_index_tables_follow_the_counter() -> None:
    view = WhileLoop(loop(0, 4, 1))
    body = Builder(view.body)
    counter = next(read for read, k in view.reads.items() if k == 0)
    last = body.scalar(3, S32)
    mirrored = body.binary("subtract", last, counter)
    flag = body.make("compare", shapes.scalar(shapes.PRED), [counter, last], comparison_direction="EQ")
    chosen = body.make("select", shapes.scalar(S32), [flag, last, mirrored])
    clamped = body.make("clamp", shapes.scalar(S32), [body.scalar(1, S32), chosen, body.scalar(2, S32)])
    wide = body.make("convert", shapes.scalar(U32), [body.make("negate", counter.shape, [counter])])
    assert view.index_table(mirrored) == [3, 2, 1, 0]
    assert view.index_table(chosen) == [3, 2, 1, 3]
    assert view.index_table(clamped) == [2, 2, 1, 2]
    assert view.index_table(wide) == [0, MAX_U32, MAX_U32 - 1, MAX_U32 - 2]
    vector = next(read for read, k in view.reads.items() if k == 1)
    assert view.index_table(vector) is None
    assert WhileLoop(loop(0, None, 1)).index_table(counter) is None


@pytest.mark.parametrize(
    ("opcode", "by", "table"),
    [
        ("divide", 2, [-2, -1, -1, 0, 0, 0, 1]),
        ("divide", -2, [2, 1, 1, 0, 0, 0, -1]),
        ("remainder", 2, [0, -1, 0, -1, 0, 1, 0]),
        ("divide", 0, None),
        ("remainder", 0, None),
    ],
)
def test_division_is_towards_zero(opcode: str, by: int, table: list[int] | None) -> None:
    view = WhileLoop(loop(-4, 3, 1))
    body = Builder(view.body)
    counter = next(read for read, k in view.reads.items() if k == 0)
    assert view.index_table(body.binary(opcode, counter, body.scalar(by, S32))) == table


def test_a_step_that_is_state_is_followed() -> None:
    made = loop(0, 9, 1)
    view = WhileLoop(made)
    bound = next(read for read, k in view.reads.items() if k == 2)
    counter = next(read for read, k in view.reads.items() if k == 0)
    view.body.root.operands[0] = Builder(view.body).binary("add", counter, bound)
    view.body.sort()
    view = WhileLoop(made)
    assert view.condition_indices == {0} and view.deciding_indices == {0, 2}
    assert view.trip_count == 1 and view.induction_index == 0


def test_a_counter_that_depends_on_data_has_no_trip_count() -> None:
    made = loop(0, 9, 1)
    body = made.called[0]
    counter = body.root.operands[0]
    data = Builder(body).make("custom-call", counter.shape, [counter], custom_call_target="data")
    body.root.operands[0] = data
    assert WhileLoop(made).trip_count is None


def test_endless_loops_give_up_soon() -> None:
    start = time.process_time()
    assert WhileLoop(loop(0, MAX_S32, 2, direction="NE")).trip_count is None
    assert time.process_time() - start < 5 * slowness()


def test_only_loops_over_tuples_have_a_view() -> None:
    made = loop(0, 4, 1)
    with pytest.raises(PassRefusal, match=f"carry a tuple .*{made.computation.root.name}"):
        WhileLoop(made.computation.root)
    with pytest.raises(PassRefusal, match="carry a tuple"):
        WhileLoop(made.computation.parameters[0])
    body = made.called[0]
    fence = Builder(body).make("opt-barrier", made.shape, [body.parameters[0]])
    body.root = fence
    with pytest.raises(PassRefusal, match=made.name):
        WhileLoop(made)


def lowered_loops(function: Any, *arguments: Any) -> list[WhileLoop]:
    text = jax.jit(function).lower(*arguments).as_text("hlo")
    assert text is not None
    module = HloModule.from_text(text)
    verify(module)
    return [WhileLoop(i) for c in module.computations for i in c.instructions if i.opcode == "while"]


def test_the_loops_that_jax_makes() -> None:
    x, xs = jnp.ones(4), jnp.ones((6, 4))

    def scan(x: jax.Array) -> Any:
        return lax.scan(lambda c, y: (c + y, c * 2), x, xs)

    def backward(x: jax.Array) -> Any:
        return jax.grad(lambda x: jnp.sum(lax.scan(lambda c, y: (jnp.sin(c) * y, None), x, xs)[0]))(x)

    def nested(x: jax.Array) -> Any:
        return lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(2, 7, lambda j, d: d + j + i, c), x)

    def down(x: jax.Array) -> Any:
        return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 2, s[1] * 2), (9, x))

    def dynamic(x: jax.Array, n: int) -> Any:
        return lax.fori_loop(0, n, lambda i, c: c + i, x)

    assert [w.trip_count for w in lowered_loops(scan, x)] == [6]
    assert [w.trip_count for w in lowered_loops(backward, x)] == [6, 6]
    assert sorted(w.trip_count or 0 for w in lowered_loops(nested, x)) == [3, 5]
    assert [w.trip_count for w in lowered_loops(down, x)] == [5]
    assert [w.trip_count for w in lowered_loops(dynamic, x, 5)] == [None]


def test_a_fused_condition_is_seen_through() -> None:
    made = loop(0, 7, 1, condition_calls=True)
    call = made.called[1].root
    call.opcode = "fusion"
    assert WhileLoop(made).trip_count == 7


def test_shapes_have_sizes_and_texts() -> None:
    cases = {
        "bf16[8,128]": 2048,
        "pred[3]": 3,
        "s4[5]": 3,
        "f32[]": 4,
        "f8e4m3fn[2,2]": 4,
        "c64[2]": 16,
        "f64[0]": 0,
    }
    parameters = "\n".join(f"  p{n} = {text} parameter({n})" for n, text in enumerate(cases))
    module = HloModule.from_text(f"HloModule m\nENTRY e {{\n{parameters}\n  ROOT c = f32[] constant(0)\n}}")
    found = [p.shape for p in module.entry.parameters]
    assert {shapes.text(s): shapes.byte_size(s) for s in found} == cases
    together = shapes.tuple_of([*found, shapes.tuple_of(found)])
    assert shapes.byte_size(together) == 2 * sum(cases.values())
    assert shapes.text(shapes.tuple_of(found[:2])) == "(bf16[8,128], pred[3])"
    assert [shapes.is_floating(s) for s in found] == [True, False, False, True, True, False, True]
    assert shapes.same(together, together) and not shapes.same(together, shapes.tuple_of(found))
    assert not shapes.same(VECTOR, shapes.scalar(S32))
