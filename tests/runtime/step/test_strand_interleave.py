"""The decorator with passes of the tests: what it calls, caches, keeps, refuses and logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError, PassRefusal
from dhelix.passes.framework.manager import PassContext, Stage
from dhelix.passes.hlo import HloModule
from dhelix.runtime.profiling import in_process
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.steps import batch, squared_error, weights


@dataclass(frozen=True)
class Replace:
    """Turns every instruction `old` into `new`, an operation with the same operands. Records its runs."""

    old: str = "sine"
    new: str = "cosine"

    name: ClassVar[str] = "replace"
    stage: ClassVar[Stage] = Stage.LOWERED
    runs: ClassVar[list[str]] = []

    def run(self, module: HloModule, context: PassContext) -> bool:
        self.runs.append(module.name)
        found = [i for c in module.computations for i in c.instructions if i.opcode == self.old]
        for instruction in found:
            instruction.opcode = self.new
        if not found:
            context.note(f"no {self.old}")
        return bool(found)


@dataclass(frozen=True)
class Refuse:
    name: ClassVar[str] = "refuse"
    stage: ClassVar[Stage] = Stage.LOWERED

    def run(self, module: HloModule, context: PassContext) -> bool:
        raise PassRefusal("this test refuses everything", module.entry.root)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forgets earlier runs of passes."""
    Replace.runs.clear()
    yield


def _sine(**options: Any) -> InterleavedStep:
    given: Any = {"passes": [Replace()], **options}
    return strand_interleave(lambda x: jnp.sin(x) + 1, **given)


def _array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(0).standard_normal(shape), jnp.float32)


def test_transformed_program_is_what_runs() -> None:
    x, step = _array(4), _sine()
    np.testing.assert_allclose(step(x), jnp.cos(x) + 1, rtol=1e-6)
    assert "cosine" in step.lower(x).as_text()
    assert step.preview(x)["replace"].changed and step.report(x)["replace"].changed
    assert len(Replace.runs) == 1
    assert step.report(x).module.startswith("jit__lambda__dhelix_")
    assert step.report(x).module in (step.lower(x).compile().as_text() or "")


@pytest.mark.parametrize("form", ["plain", "called", "jitted"])
def test_forms_of_decoration(form: str) -> None:
    def step(x: jax.Array) -> jax.Array:
        """Doc."""
        return jnp.sin(x)

    passes = [Replace()]
    decorated = {
        "plain": lambda: strand_interleave(step, passes=passes),
        "called": lambda: strand_interleave(passes=passes)(step),
        "jitted": lambda: strand_interleave(jax.jit(step, donate_argnums=0), passes=passes),
    }[form]()
    assert decorated.__name__ == "step" and decorated.__doc__ == "Doc."
    x = _array(4)
    expected = jnp.cos(x)
    np.testing.assert_allclose(decorated(x), expected, rtol=1e-6)
    assert x.is_deleted() == (form == "jitted")


def test_programs_are_told_apart_as_by_jit() -> None:
    step = strand_interleave(
        lambda x, power, *, scale=1: jnp.sin(x) ** power * scale,
        passes=[Replace()], static_argnums=1, static_argnames="scale",
    )  # fmt: skip
    x = _array(8)
    sharding = NamedSharding(jax.make_mesh((8,), ("dp",)), P("dp"))

    def runs(*args: Any, **kwargs: Any) -> int:
        before = len(Replace.runs)
        step(*args, **kwargs)
        return len(Replace.runs) - before

    assert runs(x, 2) == 1 and runs(x + 1, 2) == 0
    np.testing.assert_allclose(step(x, 2, scale=3), jnp.cos(x) ** 2 * 3, rtol=1e-6)
    assert runs(x, 3) == 1  # static by number
    assert runs(x, 2, scale=4) == 1  # static by name
    assert runs(_array(9), 2) == 1  # shape
    assert runs(x.astype(jnp.bfloat16), 2) == 1  # type
    assert runs(jax.device_put(x, sharding), 2) == 1
    assert runs(1.5, 2) == 1 and runs(2.5, 2) == 0  # a Python number is an argument and not a constant
    assert runs(jnp.float32(1.5), 2) == 1  # but its type is weak
    with jax.default_matmul_precision("highest"):
        assert runs(x, 2) == 1


def test_options_of_jit_are_kept() -> None:
    rows = NamedSharding(jax.make_mesh((8,), ("dp",)), P("dp"))

    @strand_interleave(
        passes=[Replace()],
        donate_argnames="state",
        in_shardings=(rows, None),
        out_shardings=rows,
        keep_unused=True,
    )
    def step(state: jax.Array, unused: Any) -> jax.Array:
        return jnp.sin(state)

    state = jax.device_put(_array(8, 8), rows)
    expected = jnp.cos(state)
    result = step(state, {"a": jnp.ones(3)})
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert result.sharding == rows and state.is_deleted()
    other: Any = np.ones((8, 8), np.float32)
    assert step(other, {"a": jnp.ones(3)}).sharding == rows
    abstract = jax.ShapeDtypeStruct((8, 8), jnp.float32), {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert len(jax.tree.leaves(step.lower(*abstract).args_info)) == 2


def test_step_that_no_pass_changes_is_the_jitted_one(caplog: pytest.LogCaptureFixture) -> None:
    step = strand_interleave(lambda x: x * 2, passes=[Replace()])
    for size in (2, 3):
        np.testing.assert_array_equal(step(jnp.ones(size)), 2 * np.ones(size))
    assert "__dhelix_" not in step.lower(jnp.ones(2)).as_text()
    assert not step.report(jnp.ones(2))["replace"].changed
    assert [r.getMessage() for r in caplog.records] == ["dhelix: <lambda> runs as it is: replace: no sine"]


def test_refusal_is_said_once_and_raises_when_strict(caplog: pytest.LogCaptureFixture) -> None:
    step = _sine(passes=[Refuse()])
    x = _array(3)
    np.testing.assert_array_equal(step(x), jnp.sin(x) + 1)
    step(_array(5))
    (record,) = caplog.records
    assert "refuses everything" in record.getMessage()
    with pytest.raises(PassRefusal, match="refuses everything"):
        _sine(passes=[Refuse()], strict=True)(x)


def test_program_that_does_not_compile_gives_way_to_the_plain_one(caplog: pytest.LogCaptureFixture) -> None:
    broken = Replace("sine", "no-such-operation")
    x = _array(3)
    np.testing.assert_array_equal(_sine(passes=[broken])(x), jnp.sin(x) + 1)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    with pytest.raises(DhelixError):
        _sine(passes=[broken], strict=True)(x)


def test_dropped_pass() -> None:
    x = _array(3)
    np.testing.assert_array_equal(_sine(disable=["replace"])(x), jnp.sin(x) + 1)


def test_inside_another_transformation_it_is_part_of_it(caplog: pytest.LogCaptureFixture) -> None:
    step, x = _sine(), _array(3)
    np.testing.assert_allclose(jax.jit(step)(x), jnp.sin(x) + 1, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: step(x).sum())(x), jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(step)(x), jnp.sin(x) + 1, rtol=1e-6)
    assert len(caplog.records) == 1 and "decorate the outermost step" in caplog.records[0].getMessage()


@pytest.mark.parametrize("how", ["DHELIX", "disable_jit"])
def test_switched_off(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = _sine(), _array(3)
    if how == "DHELIX":
        monkeypatch.setenv("DHELIX", "off")
    with jax.disable_jit(how == "disable_jit"):
        np.testing.assert_allclose(step(x), jnp.sin(x) + 1, rtol=1e-6)
        assert not step.report(x).changed and not step.preview(x).changed
    if how == "DHELIX":
        assert "sine" in step.lower(x).as_text()
    assert not Replace.runs


def test_where_jax_looks_for_nans_it_finds_them_as_in_its_own_programs() -> None:
    step = strand_interleave(lambda x: jnp.log(x), passes=[Replace("log", "sine")])
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        step(-_array(3) - 1)


def test_switched_off_micro_batches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches decide the memory of the step, and with `reduce=` also its result."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(x @ w))

    step = strand_interleave(lambda w, x: value_and_grad(loss)(w, x), microbatches=4, reduce="sum")
    w, x = _array(3), jnp.arange(24.0).reshape(8, 3)
    on = step(w, x)
    monkeypatch.setenv("DHELIX", "off")
    assert "while" in step.lower(w, x).as_text()
    np.testing.assert_allclose(step(w, x)[0], on[0], rtol=1e-6)
    np.testing.assert_allclose(on[0], 4 * loss(w, x), rtol=1e-6)


def test_profile_is_of_the_program_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[tuple[str, Any]] = []

    def profile(process: None, lowered: jax.stages.Lowered, compiled: Any, arguments: Any, *options: Any) -> Any:
        programs.append((lowered.as_text(), compiled(*arguments[0], **arguments[1])))
        return options

    monkeypatch.setattr(in_process, "this_process", lambda *_: None)
    monkeypatch.setattr(in_process, "profile", profile)
    x = _array(4)
    step = strand_interleave(lambda x, power: jnp.sin(x) ** power, passes=[Replace()], static_argnames="power")
    options = {"out": "h200.json", "pairs": False, "again": True, "progress": False}
    assert step.profile(x, power=2, **options) == ("h200.json", False, True, False)
    step = strand_interleave(lambda x, power: jnp.sin(x) ** power, passes=[Refuse()], static_argnums=1)
    step.profile(x, 2)
    monkeypatch.setenv("DHELIX", "off")
    _sine(static_argnums=()).profile(x)
    (ours, cosines), (alone, sines), (off, _) = programs
    assert "cosine" in ours and "sine" in alone and "sine" in off and not any("__dhelix" in t for t in (alone, off))
    np.testing.assert_allclose(cosines, jnp.cos(x) ** 2, rtol=1e-5)
    np.testing.assert_allclose(sines, jnp.sin(x) ** 2, rtol=1e-5)


def test_profile_without_gpu() -> None:
    with pytest.raises(DhelixError, match="profiling needs GPUs"):
        _sine().profile(_array(4))
    assert not Replace.runs


def test_method() -> None:
    class Trainer:
        @strand_interleave(passes=[Replace()], static_argnums=0)
        def step(self, x: jax.Array) -> jax.Array:
            return jnp.sin(x)

    step = Trainer().step
    np.testing.assert_allclose(step(_array(3)), jnp.cos(_array(3)), rtol=1e-6)
    assert step.report(_array(3)).changed and step.preview(_array(3)).changed
    assert "cosine" in step.lower(_array(3)).as_text() and step.__name__ == "step"


def test_microbatches_split_the_batch_only_inside_the_step() -> None:
    def step(w: jax.Array, data: Any) -> Any:
        return value_and_grad(squared_error)(w, data)

    decorated = strand_interleave(step, microbatches=4, passes=[])
    text = decorated.lower(weights(), batch()).as_text()
    assert "tensor<4x4x8xf32>" in text  # [micro-batches, rows, width]
    assert "tensor<4x4x8xf32>" not in jax.jit(step).lower(weights(), batch()).as_text()


def test_microbatches_without_value_and_grad(caplog: pytest.LogCaptureFixture) -> None:
    def step(w: jax.Array, data: Any) -> Any:
        return jax.value_and_grad(squared_error)(w, data)

    strand_interleave(step, microbatches=4, passes=[])(weights(), batch())
    assert "microbatches= has no effect" in caplog.text
    with pytest.raises(DhelixError, match="does not call dhelix.value_and_grad"):
        strand_interleave(step, microbatches=4, passes=[], strict=True)(weights(), batch())


def test_bad_options() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (step, {"microbatches": 0}, "microbatches=0"),
        (step, {"microbatches": 2.0}, "microbatches=2.0"),
        (step, {"reduce": "median"}, "use one of mean, sum, weighted"),
        (step, {"schedule": "fast"}, "schedule='fast'"),
        (step, {"donate": 0}, "'donate' is not an option of"),
        (step, {"disable": ["no-such-pass"]}, "no pass 'no-such-pass'"),
        (3, {}, "decorates a function, not int"),
        (jax.jit(step), {"donate_argnums": 0}, "is already jitted: give donate_argnums"),
        (jax.jit(step), {"microbatches": 2}, "is already jitted"),
        (nnx.jit(step), {"donate_argnums": 0}, "is already jitted: give donate_argnums"),
        (jax.pmap(step), {}, "neither a plain function nor the result of jax.jit, nnx.jit or eqx.filter_jit"),
        (strand_interleave(step), {}, "step is already interleaved: remove one"),
    ]
    for function, options, message in cases:
        with pytest.raises(DhelixError, match=message):
            strand_interleave(**options)(function)
