"""Real JAX train steps that cannot be interleaved, each with the reason; and unusual ones that can, with equal results.

One device, two layers, three micro-batches. JAX lowers every step, and the passes that `strand_interleave` runs before
XLA transform it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from dhelix.errors import PassRefusal
from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED, REFUSED, PassReport
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.runtime.step.pass_lists import default_passes

LAYERS, MICROBATCHES, ROWS, WIDTH = 2, 3, 2, 4
Step = Callable[..., Any]
STEPS: dict[str, tuple[Step, tuple[Any, ...]]] = {}


def _array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


W, BATCH = _array(LAYERS, WIDTH, WIDTH), _array(MICROBATCHES, ROWS, WIDTH)


def _layers(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(_layers(x, w) ** 2)


def _accumulate(loss: Step, w: Any, batch: jax.Array) -> Any:
    """Loss and gradients, summed over micro-batches."""

    def body(sums: Any, x: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(w, x)), None

    return jax.lax.scan(body, (jnp.float32(0), jax.tree.map(jnp.zeros_like, w)), batch)[0]


def _step(*arguments: Any) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        STEPS[step.__name__] = (step, arguments)
        return step

    return register


@_step(W, BATCH)
def dynamic_loss_scale(w: jax.Array, batch: jax.Array) -> Any:
    """The loss scale is halved after a micro-batch whose gradients overflow."""

    def body(carry: Any, x: jax.Array) -> tuple[Any, None]:
        total, scale = carry
        gradient = jax.grad(lambda w: _loss(w, x) * scale)(w)
        finite = jnp.all(jnp.isfinite(gradient))
        total += jnp.where(finite, gradient / scale, 0)
        return (total, jnp.where(finite, scale, scale / 2)), None

    return jax.lax.scan(body, (jnp.zeros_like(w), jnp.float32(1024)), batch)[0]


@jax.custom_vjp
def _quantize(x: jax.Array, history: jax.Array) -> jax.Array:
    return x / jnp.max(history)


def _quantize_backward(residuals: Any, cotangent: jax.Array) -> Any:
    """The "gradient" of the history is the new history, as in Flax's fp8 operations."""
    amax, history = residuals
    newest = jnp.maximum(amax, jnp.max(jnp.abs(cotangent)))
    return cotangent / jnp.max(history), jnp.roll(history, 1).at[0].set(newest)


_quantize.defvjp(lambda x, h: (_quantize(x, h), (jnp.max(jnp.abs(x)), h)), _quantize_backward)


@_step(W, BATCH)
def fp8_amax_history(w: jax.Array, batch: jax.Array) -> Any:
    def body(carry: Any, x: jax.Array) -> tuple[Any, None]:
        total, history = carry
        gradient, history = jax.grad(lambda w, h: _loss(w, _quantize(x, h)), (0, 1))(w, history)
        return (total + gradient, history), None

    return jax.lax.scan(body, (jnp.zeros_like(w), jnp.ones(16)), batch)[0]


@_step(W, BATCH)
def parameters_updated_inside_the_loop(w: jax.Array, batch: jax.Array) -> Any:
    return jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(_loss)(w, x), None), w, batch)


_multi_steps = optax.MultiSteps(optax.adam(1e-2), MICROBATCHES)


@_step(W, _multi_steps.init(W), BATCH[0])
def optax_multi_steps(w: jax.Array, state: Any, x: jax.Array) -> Any:
    updates, state = _multi_steps.update(jax.grad(_loss)(w, x), state, w)
    return optax.apply_updates(w, updates), state


@_step(W, W, BATCH[0])
def accumulation_across_calls(w: jax.Array, total: jax.Array, x: jax.Array) -> Any:
    return total + jax.grad(_loss)(w, x)


@_step(W, BATCH)
def unequal_micro_batches(w: jax.Array, batch: jax.Array) -> Any:
    return sum(jax.grad(_loss)(w, x) for x in (batch[0], batch[1], batch[2, :1]))


@_step(W, BATCH)
def ordered_print(w: jax.Array, batch: jax.Array) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        value = _loss(w, x)
        jax.debug.print("loss {}", value, ordered=True)
        return value

    return _accumulate(loss, w, batch)


@_step(W, BATCH)
def ordered_io_callback(w: jax.Array, batch: jax.Array) -> Any:
    def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        value, gradient = jax.value_and_grad(_loss)(w, x)
        io_callback(lambda value: None, None, value, ordered=True)
        return total + gradient, None

    return jax.lax.scan(body, jnp.zeros_like(w), batch)[0]


@_step(W, BATCH, jnp.int32(MICROBATCHES))
def dynamic_number_of_micro_batches(w: jax.Array, batch: jax.Array, number: jax.Array) -> Any:
    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + jax.grad(_loss)(w, batch[i])

    return jax.lax.fori_loop(0, number, body, jnp.zeros_like(w))


@_step(W, BATCH)
def evaluation(w: jax.Array, batch: jax.Array) -> Any:
    return jax.lax.scan(lambda total, x: (total + _loss(w, x), None), jnp.float32(0), batch)[0]


@_step(W, BATCH[:1])
def one_micro_batch(w: jax.Array, batch: jax.Array) -> Any:
    return _accumulate(_loss, w, batch)


@_step(W, BATCH)
def offloaded_residuals(w: jax.Array, batch: jax.Array) -> Any:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(checkpoint_name(x @ w, "hidden"))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        remat = jax.checkpoint(layer, policy=policy)
        return jnp.sum(jax.lax.scan(lambda x, w: (remat(x, w), None), x, w)[0])

    return _accumulate(loss, w, batch)


REASONS = {
    "dynamic_loss_scale": r"reads f32\[\], which .*a dynamic loss scale .*; update it once",
    "fp8_amax_history": r"reads f32\[16\], which .*an fp8 amax history .*; update it once",
    "parameters_updated_inside_the_loop": r"reads f32\[2,4,4\], .*parameters updated inside .*; update it once",
    "optax_multi_steps": "does not take gradients in a loop over micro-batches",
    "accumulation_across_calls": "does not take gradients in a loop over micro-batches",
    "unequal_micro_batches": "takes 3 independent gradients: .*, because micro-batch 3 has another shape ",
    "ordered_print": r"ordered callbacks; make them unordered \(ordered=False\)",
    "ordered_io_callback": r"ordered callbacks; make them unordered \(ordered=False\)",
    "dynamic_number_of_micro_batches": "number of micro-batches is dynamic .*; loop over a static number",
    "evaluation": "the step has no backward pass",
    "one_micro_batch": "1 micro-batch leaves nothing to interleave; split the batch .*, and do not unroll",
    "offloaded_residuals": "offloaded to the host; choose a jax.checkpoint policy that keeps them",
}
NO_LOOP = {"optax_multi_steps", "accumulation_across_calls", "evaluation"}


def _lowered(name: str) -> bytes:
    step, arguments = STEPS[name]
    platform = "cuda" if name == "offloaded_residuals" else "cpu"  # the CPU has no other memory to offload to
    return hlo_bytes(jax.jit(step).trace(*arguments).lower(lowering_platforms=(platform,)))


@pytest.mark.parametrize("name", REASONS)
def test_refused(name: str) -> None:
    before = _lowered(name)
    after, report = PassManager(default_passes()).run(Stage.LOWERED, before)
    assert after is None, "the module stays as it was, byte for byte"
    refusal = report.passes[0]
    assert refusal.outcome == REFUSED
    (note,) = refusal.notes
    assert re.search(REASONS[name], note.message) and "\n" not in note.message
    assert (note.instruction is None) == (name in NO_LOOP), "there is no instruction to name without a loop"
    with pytest.raises(PassRefusal, match=re.escape(note.message)):
        PassManager(default_passes(), strict=True).run(Stage.LOWERED, before)


def test_a_refusal_names_an_instruction_of_the_users_program() -> None:
    """The name is not that of an element of the loop state."""
    _, report = PassManager(default_passes()).run(Stage.LOWERED, _lowered("dynamic_loss_scale"))
    assert "get-tuple-element" not in str(report.passes[0].notes[0].instruction)


def _interleaved(step: Step, *arguments: Any) -> tuple[PassReport, Any, Any]:
    """The report of strand duplication, and the results of the plain and of the interleaved step."""
    lowered = jax.jit(step).lower(*arguments)
    after, report = PassManager(default_passes(), strict=True).run(Stage.LOWERED, hlo_bytes(lowered))
    assert after is not None and report.passes[0].outcome == CHANGED
    plain = lowered.compile()(*arguments)
    jax.effects_barrier()
    strands = with_hlo(lowered, after).compile()(*arguments)
    jax.effects_barrier()
    return report.passes[0], plain, strands


def _assert_equal(plain: Any, strands: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, plain, strands)


def _merged(report: PassReport) -> list[str]:
    """The trip counts of merged layer loops."""
    (facts,) = [n.facts for n in report.notes if n.message == "two strands"]
    return [text.rpartition(" x ")[2] for text in facts["merged_loops"]]


def _apart(report: PassReport) -> int:
    return sum("layer loop not merged" in note.message for note in report.notes)


def test_frozen_layers_are_skewed_but_not_merged() -> None:
    """Five frozen layers run forward in their own loop; another loop has three trained layers."""

    def step(frozen: jax.Array, trained: jax.Array, batch: jax.Array) -> Any:
        return _accumulate(lambda w, x: jnp.sum(_layers(_layers(x, frozen), w)), trained, batch)

    report, plain, strands = _interleaved(step, _array(5, WIDTH, WIDTH), _array(3, WIDTH, WIDTH), BATCH)
    assert _merged(report) == ["3"] and _apart(report) == 1
    _assert_equal(plain, strands)


def test_layers_that_run_twice_forward_and_once_backward() -> None:
    """A straight-through estimator: four layers forward, of which two are differentiated. Two iterations of the forward
    loop, which keeps no residuals, run next to the backward loop. Its other two iterations run alone, and so does the
    loop that recomputes residuals.
    """

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def deep(x: jax.Array, w: jax.Array) -> jax.Array:
            return _layers(x, jnp.concatenate([w, w]))

        def backward(residuals: Any, cotangent: jax.Array) -> Any:
            return jax.vjp(_layers, *residuals)[1](cotangent)

        deep.defvjp(lambda x, w: (deep(x, w), (x, w)), backward)
        return jnp.sum(deep(x, w))

    report, plain, strands = _interleaved(lambda w, batch: _accumulate(loss, w, batch), W, BATCH)
    assert _merged(report) == ["2"] and _apart(report) == 2
    _assert_equal(plain, strands)


def test_encoder_and_decoder_of_different_depth() -> None:
    """Only one pair can merge: the decoder's forward needs the whole encoder, and the encoder's backward needs the
    decoder's. The report names both loops of the encoder.
    """

    def loss(w: Any, x: jax.Array) -> jax.Array:
        encoded = _layers(x, w["encoder"])
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w + encoded), None), x, w["decoder"])[0])

    w = {"encoder": W, "decoder": _array(3, WIDTH, WIDTH)}
    report, plain, strands = _interleaved(lambda w, batch: _accumulate(loss, w, batch), w, BATCH)
    assert _merged(report) == ["3"] and _apart(report) == 2
    _assert_equal(plain, strands)


def test_a_loop_over_optimizer_steps_keeps_its_order_and_its_micro_batches_are_interleaved() -> None:
    def step(w: jax.Array, batches: jax.Array) -> Any:
        def one(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
            value, gradient = _accumulate(_loss, w, batch)
            return w - 0.1 * gradient, value

        return jax.lax.scan(one, w, batches)

    report, plain, strands = _interleaved(step, W, jnp.stack([BATCH, BATCH[::-1], BATCH, BATCH]))
    assert _merged(report) == [str(LAYERS)]
    _assert_equal(plain, strands)


def test_layers_in_groups_merge_at_both_levels() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, group: (_layers(x, group), None), x, w)[0])

    w = _array(3, LAYERS, WIDTH, WIDTH)
    report, plain, strands = _interleaved(lambda w, batch: _accumulate(loss, w, batch), w, BATCH)
    assert _merged(report) == ["3", str(LAYERS)]
    _assert_equal(plain, strands)


def test_a_function_with_the_loop_that_is_called_twice() -> None:
    """The module has one computation with two callers."""
    gradients = jax.jit(lambda w, batch: _accumulate(_loss, w, batch)[1])

    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        w -= 0.1 * gradients(w, batch)
        return w - 0.1 * gradients(w, batch)

    report, plain, strands = _interleaved(step, W, BATCH)
    assert _merged(report) == [str(LAYERS)]
    _assert_equal(plain, strands)


def test_a_loop_over_steps_around_a_shard_map() -> None:
    """The body of a shard_map stays a call, also inside a loop over steps."""
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradients(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.lax.psum(_accumulate(_loss, w, batch)[1], "dp")

    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P(None, "dp")), out_specs=P(), check_vma=False)

    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda w, _: (w - 0.1 * sharded(w, batch), None), w, None, length=2)[0]

    report, plain, strands = _interleaved(step, W, _array(MICROBATCHES, 2 * ROWS, WIDTH))
    assert _merged(report) == [str(LAYERS)]
    _assert_equal(plain, strands)


def test_loops_that_draw_random_numbers_are_not_reported() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(x > 0))
        return _loss(w, x * jax.random.bernoulli(key, 0.5, x.shape))

    w, batch = _array(LAYERS, 16, 16), _array(MICROBATCHES, 8, 16)
    report, plain, strands = _interleaved(lambda w, batch: _accumulate(loss, w, batch), w, batch)
    assert _merged(report) == [str(LAYERS)] and _apart(report) == 0
    _assert_equal(plain, strands)


CALLS: list[float] = []


def _debug_print(y: jax.Array) -> jax.Array:
    jax.debug.callback(lambda value: CALLS.append(float(value)), jnp.sum(y))
    return y


def _pure_callback(y: jax.Array) -> jax.Array:
    def host(value: np.ndarray) -> np.ndarray:
        CALLS.append(float(value.sum()))
        return np.asarray(value) * np.float32(2)

    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return y + jax.pure_callback(host, shape, jax.lax.stop_gradient(y))


def _io_callback(y: jax.Array) -> jax.Array:
    io_callback(lambda value: CALLS.append(float(value)), None, jax.lax.stop_gradient(jnp.sum(y)), ordered=False)
    return y


@pytest.mark.parametrize("callback", [_debug_print, _pure_callback, _io_callback])
def test_unordered_callbacks_run_once_per_micro_batch(callback: Step) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(callback(_layers(x, w)) ** 2)

    CALLS.clear()
    report, plain, strands = _interleaved(lambda w, batch: _accumulate(loss, w, batch), W, BATCH)
    _assert_equal(plain, strands)
    assert _merged(report) == [str(LAYERS)]
    assert len(CALLS) == 2 * MICROBATCHES
    assert sorted(CALLS[:MICROBATCHES]) == sorted(CALLS[MICROBATCHES:]), "the plain step's, then the other's"


def test_unordered_prints_come_out(capfd: pytest.CaptureFixture[str]) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("first row {}", x[0, 0])
        return _loss(w, x)

    _interleaved(lambda w, batch: _accumulate(loss, w, batch), W, BATCH)
    assert capfd.readouterr().out.count("first row") == 2 * MICROBATCHES


def test_a_module_that_was_interleaved_is_not_interleaved_again() -> None:
    lowered = jax.jit(lambda w, batch: _accumulate(_loss, w, batch)).lower(W, BATCH)
    once, _ = PassManager(default_passes()).run(Stage.LOWERED, hlo_bytes(lowered))
    assert once is not None
    twice, report = PassManager(default_passes()).run(Stage.LOWERED, once)
    assert twice is None and report.passes[0].outcome == REFUSED


def test_of_two_loops_the_one_that_can_be_is_interleaved(capfd: pytest.CaptureFixture[str]) -> None:
    """The report gives the reason for the other loop."""

    def chatty(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("loss", ordered=True)
        return _loss(w, x)

    report, plain, strands = _interleaved(
        lambda w, batch: (_accumulate(chatty, w, batch), _accumulate(_loss, w, batch)), W, BATCH
    )
    _assert_equal(plain, strands)
    assert _merged(report) == [str(LAYERS)]
    assert [note.message for note in report.notes if "ordered callbacks" in note.message]
    assert capfd.readouterr().out.count("loss") == 2 * MICROBATCHES
