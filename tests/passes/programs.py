"""Small train steps of every kind that the strand passes have to keep exact.

A `Program` names one step by its features, and `build` makes the step. The `repr` of a `Program` is enough to make it
again, so a failure that hypothesis has shrunk is one line of a regression test.

The step: a loop over micro-batches of `jax.value_and_grad(loss)`, then an SGD update. Shapes are tiny, because the
tests are about the structure of the program, not its arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.microbatching

from dhelix.tests.passes import program_losses as losses
from dhelix.tests.passes.program_losses import DTYPES, ROWS, WIDTH, WORDS

LOOPS = ("scan", "reverse", "indexed", "twice", "fori", "countdown")
WRITTEN_OUT = ("twice", "python", "unrolled")  # unrolled by `unroll=`, or by Python
OPTAX_LOOPS = ("optax_sum", "optax_mean", "optax_running_mean")
GRADIENTS = ("", "second_loss", "per_example", "jitted")
CARRIES = (
    "average", "counter", "history", "lagged", "largest", "mixed", "momentum", "previous", "swapped", "untouched",
)  # fmt: skip
METRICS = ("activations", "gradients", "index", "losses", "norms")
ACCUMULATIONS = ("sum", "flipped", "clipped", "running_mean", "skipped", "slots", "weighted", "stacked")
STEPS = ("once", "scanned", "called")
REFUSED = ("loss_scale", "parameters", "gated", "dynamic")


@dataclasses.dataclass(frozen=True)
class Program:
    """Features of a train step; the defaults make the plainest one. The tuples here and in `losses` list strings."""

    microbatches: int = 2
    loop: str = "scan"
    stack: str = "scan"
    depth: int = 2
    other_depth: int = 1
    """Layers of a group, layers that are not frozen, or layers of the decoder."""
    layer: str = "mlp"
    remat: str = ""
    dropout: str = ""
    auxiliary: str = ""
    gradient: str = ""
    """How a micro-batch is differentiated: also a second time with another batch, per example, or in its own `jit`."""
    accumulation: str = "sum"
    carries: tuple[str, ...] = ()
    """Other values that the loop carries from one micro-batch to the next."""
    metrics: tuple[str, ...] = ()
    """Values that the loop returns for each micro-batch."""
    dtype: str = "f32"
    half_parameters: bool = False
    """Parameters and their gradients have `dtype`, and sums are in float32. Otherwise the loss casts parameters."""
    tokens: bool = False
    """Integer inputs; the loss uses the embedding a second time."""
    constants: bool = False
    """Masks and angles that depend only on constants and loop invariants; forward and backward use them."""
    evaluation: bool = False
    """A second loop over the micro-batches, without gradients."""
    steps: str = "once"
    """Two optimizer steps: in a scan, or by one jitted function that is called twice."""
    infinite: bool = False
    """One input is infinite, and NaNs spread from it."""
    refused: str = ""
    """The feature for which the step must not be interleaved."""

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return f"Program({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"


def legal(program: Program) -> Program:
    """`program` without impossible combinations.

    Optax's loop carries no state, a loop unrolled by two must remain a loop, and layers with their own backward pass
    have no second derivative.
    """
    changes: dict[str, Any] = {}
    if program.loop in OPTAX_LOOPS:
        changes = {"accumulation": "sum", "carries": (), "metrics": ()}
        if program.dropout == "carried":
            changes["dropout"] = "seeds"
    if program.loop == "twice":
        changes["microbatches"] = max(4, program.microbatches)
    if program.stack in ("same_way", "buffered") and program.auxiliary == "penalty":
        changes["auxiliary"] = "carried"
    return dataclasses.replace(program, **changes)


def build(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step, to be jitted, and its arguments in float32 and int32: parameters, batch, number of micro-batches."""
    stored = DTYPES[program.dtype] if program.half_parameters else jnp.float32

    def step(parameters: Any, batch: Any, count: Any) -> Any:
        parameters = jax.tree.map(lambda x: x.astype(stored), parameters)

        def one(parameters: Any, batch: Any) -> Any:
            return _step(program, parameters, batch, count)

        if program.steps == "once":
            result = one(parameters, batch)
        else:
            batches = jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, axis=1)]), batch)
            loop = jax.lax.scan if program.steps == "scanned" else _call_twice
            result = loop(one, parameters, batches)
        return jax.tree.map(lambda x: x.astype(jnp.float32), result)

    random = np.random.RandomState(1)
    shapes = losses.parameter_shapes(program).items()
    parameters = {name: np.asarray(random.standard_normal(s) / 2, np.float32) for name, s in shapes}
    return step, (parameters, _batch(program), np.int32(program.microbatches))


def _call_twice(step: Callable[..., Any], parameters: Any, batches: Any) -> Any:
    step = jax.jit(step)
    parameters, first = step(parameters, jax.tree.map(lambda x: x[0], batches))
    parameters, second = step(parameters, jax.tree.map(lambda x: x[1], batches))
    return parameters, (first, second)


def _batch(p: Program) -> dict[str, np.ndarray]:
    """Leaves [microbatches, ROWS, ...]."""
    random = np.random.RandomState(2)
    x = random.standard_normal((p.microbatches, ROWS, WIDTH)).astype(np.float32)
    if p.infinite:
        x[p.microbatches // 2, 1, 2] = np.inf
    words = random.randint(0, WORDS, (p.microbatches, ROWS)).astype(np.int32)
    seeds = np.arange(p.microbatches * ROWS, dtype=np.int32).reshape(p.microbatches, ROWS)
    return {"x": x, "words": words, "seed": seeds, "weight": words + 1}


def _step(p: Program, params: Any, batch: Any, count: Any) -> tuple[Any, Any]:
    """New parameters, and all other values that the loop computed."""
    constants = jnp.sin(params["head"][0, 0] * jnp.arange(WIDTH))
    differentiate = _differentiation(p, constants)
    if p.loop in OPTAX_LOOPS:
        gradients, rest = _optax_loop(p, differentiate, params, batch)
    else:
        gradients, rest = _own_loop(p, differentiate, params, batch, count)
    new = jax.tree.map(lambda x, g: (x - 0.1 * g / p.microbatches).astype(x.dtype), params, gradients)
    if p.evaluation:
        state = _initial_state(p, params)
        rest["evaluation"] = jax.lax.map(lambda b: losses.loss_function(p)(new, b, state, constants)[0], batch)
    return new, {"gradients": gradients, **rest}


def _differentiation(p: Program, constants: Any) -> Callable[..., Any]:
    """(parameters, batch, state) -> ((loss, metrics), gradients in float32)."""
    value_and_grad = jax.value_and_grad(losses.loss_function(p), has_aux=True)

    def differentiate(params: Any, batch: Any, state: Any) -> Any:
        if p.gradient == "per_example":
            rows = jax.tree.map(lambda x: x[:, None], batch)
            result = jax.vmap(value_and_grad, (None, 0, None, None))(params, rows, state, constants)
            result = jax.tree.map(lambda x: jnp.mean(x, axis=0), result)
        else:
            result = value_and_grad(params, batch, state, constants)
        if p.gradient == "second_loss":
            turned = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), batch)
            result = jax.tree.map(jnp.add, result, value_and_grad(params, turned, state, constants))
        return result[0], jax.tree.map(lambda g: g.astype(jnp.float32), result[1])

    return jax.jit(differentiate) if p.gradient == "jitted" else differentiate


def _optax_loop(p: Program, differentiate: Callable[..., Any], params: Any, batch: Any) -> tuple[Any, Any]:
    kinds = optax.microbatching.AccumulationType
    kind = kinds[p.loop.removeprefix("optax_").upper()]

    def function(params: Any, batch: Any) -> Any:
        (loss, aux), gradients = differentiate(params, batch, {})
        return (gradients, loss), loss[None], aux["mean"]

    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    run = optax.microbatching.microbatch(function, 1, ROWS, (kind, kinds.CONCAT, kinds.SUM))
    (gradients, loss), each, mean = run(params, whole)
    return gradients, {"loss": loss, "losses": each, "mean": mean}


def _own_loop(p: Program, differentiate: Callable[..., Any], params: Any, batch: Any, count: Any) -> tuple[Any, Any]:
    def micro_step(state: Any, index_and_inputs: Any) -> tuple[Any, Any]:
        index, inputs = index_and_inputs
        current, state = _next_forward_state(state, inputs)
        now = state["parameters"] if p.refused == "parameters" else params
        (loss, aux), gradients = differentiate(now, inputs, current)
        state = _accumulate(p, index, inputs, state, gradients)
        state = _next_state(p, state, gradients, loss, aux)
        return state, _outputs(p, index, gradients, loss, aux)

    def indexed(state: Any, index: Any) -> tuple[Any, Any]:
        inputs = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, False), batch)
        return micro_step(state, (index, inputs))

    state = _initial_state(p, params)
    indices = jnp.arange(p.microbatches)
    if p.refused == "dynamic":
        state, outputs = jax.lax.fori_loop(0, count, lambda i, s: indexed(s, i)[0], state), {}
    elif p.loop in ("fori", "countdown"):
        state, outputs = _loop_without_outputs(p, indexed, state)
    elif p.loop == "indexed":
        state, outputs = jax.lax.scan(indexed, state, indices)
    elif p.loop == "python":
        state, outputs = _python_loop(p, micro_step, state, batch)
    else:
        unroll, reverse = {"twice": 2, "unrolled": True}.get(p.loop, 1), p.loop == "reverse"
        state, outputs = jax.lax.scan(micro_step, state, (indices, batch), unroll=unroll, reverse=reverse)
    gradients = outputs["stacked"] if p.accumulation == "stacked" else state["sum"]
    if p.accumulation in ("stacked", "slots"):
        gradients = jax.tree.map(lambda g: jnp.sum(g, axis=0), gradients)
    state.pop("key", None)
    return gradients, {"state": state, "outputs": outputs}


def _python_loop(p: Program, body: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, Any]:
    outputs = []
    for index in range(p.microbatches):
        state, one = body(state, (index, jax.tree.map(lambda x, n=index: x[n], batch)))
        outputs.append(one)
    return state, jax.tree.map(lambda *each: jnp.stack(each), *outputs)


def _loop_without_outputs(p: Program, body: Callable[..., Any], state: Any) -> tuple[Any, Any]:
    """`fori_loop`, or a `while_loop` that counts down. Outputs that a scan would stack are written slot by slot."""
    shapes = jax.eval_shape(body, state, jnp.int32(0))[1]
    outputs = jax.tree.map(lambda s: jnp.zeros((p.microbatches, *s.shape), s.dtype), shapes)

    def write(index: Any, both: Any) -> Any:
        state, new = body(both[0], index)
        return state, jax.tree.map(lambda all, one: all.at[index].set(one), both[1], new)

    def down(index_and_both: Any) -> Any:
        index, both = index_and_both
        return index - 1, write(index, both)

    if p.loop == "fori":
        return jax.lax.fori_loop(0, p.microbatches, write, (state, outputs))
    last = jnp.int32(p.microbatches - 1)
    return jax.lax.while_loop(lambda c: c[0] >= 0, down, (last, (state, outputs)))[1]


def _initial_state(p: Program, params: Any) -> dict[str, Any]:
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    deep, rows = zeros[losses.last_layers(p)], jnp.zeros((WIDTH,), jnp.float32)
    made = {
        "average": jnp.float32(0), "counter": jnp.int32(0), "history": (rows, rows + 1, rows - 1),
        "lagged": (deep, deep + 1), "largest": jnp.float32(0), "mixed": (jnp.float32(1), deep), "momentum": zeros,
        "previous": zeros, "swapped": (deep, deep + 1), "untouched": params["head"],
        "loss_scale": jnp.float32(8), "parameters": params, "gated": jnp.float32(1),
    }  # fmt: skip
    state = {"loss": jnp.float32(0), **{name: made[name] for name in (*p.carries, p.refused) if name in made}}
    if p.accumulation == "slots":
        state["sum"] = jax.tree.map(lambda x: jnp.zeros((p.microbatches, *x.shape), jnp.float32), params)
    elif p.accumulation != "stacked":
        state["sum"] = zeros
    if p.accumulation in ("weighted", "skipped"):
        state["count"] = jnp.int32(0)
    if p.dropout == "carried":
        state["key"] = jax.random.key(3)
    return state


def _next_forward_state(state: dict[str, Any], inputs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that forward reads now, and the state with all values updated that need no gradient."""
    current, state = dict(state), dict(state)
    if "key" in state:
        state["key"], current["key"] = jax.random.split(state["key"])
    if "counter" in state:
        state["counter"] += 1
    if "history" in state:  # a value is handed on twice before forward reads it
        _, newer, newest = state["history"]
        state["history"] = newer, newest, jnp.mean(inputs["x"], axis=0)
    return current, state


def _next_state(p: Program, state: dict[str, Any], gradients: Any, loss: jax.Array, aux: Any) -> dict[str, Any]:
    norm = _norm(gradients)
    deep = gradients[losses.last_layers(p)]
    new: dict[str, Callable[[Any], Any]] = {
        "loss": lambda s: s + loss,
        "average": lambda s: 0.5 * s + 0.1 * aux["mean"],
        "previous": lambda s: gradients,
        "lagged": lambda s: (s[1], deep),
        "swapped": lambda s: (s[1] + 1, s[0] + deep),
        "momentum": lambda s: jax.tree.map(lambda m, g: 0.5 * m + g, s, gradients),
        "largest": lambda s: jnp.maximum(s, norm),
        "mixed": lambda s: (s[0] * 0.5 + loss, s[1] * s[0] + deep),
        "loss_scale": lambda s: jnp.where(jnp.isfinite(norm), s * 2, s / 2),
        "parameters": lambda s: jax.tree.map(lambda x, g: (x - 0.1 * g).astype(x.dtype), s, gradients),
        "gated": lambda s: norm,
    }
    return {name: new[name](value) if name in new else value for name, value in state.items()}


def _norm(gradients: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))


def _accumulate(p: Program, index: Any, inputs: Any, state: dict[str, Any], gradients: Any) -> dict[str, Any]:

    def add(old: jax.Array, g: jax.Array) -> jax.Array:
        match p.accumulation:
            case "flipped":
                return g + old
            case "clipped":
                return old + g / jnp.maximum(_norm(gradients), 1)
            case "running_mean":
                return old + (g - old) / (jnp.asarray(index, jnp.float32) + 1)
            case "skipped":
                return jnp.where(_norm(gradients) < 2, old + g, old)
            case "slots":
                return old.at[index].set(g)
            case "weighted":
                return old + g * jnp.sum(inputs["weight"]).astype(jnp.float32)
            case _:
                return old + g

    if p.accumulation == "stacked":
        return state
    new = dict(state, sum=jax.tree.map(add, state["sum"], gradients))
    if p.accumulation == "weighted":
        new["count"] += jnp.sum(inputs["weight"])
    if p.accumulation == "skipped":
        new["count"] += _norm(gradients) < 2
    return new


def _outputs(p: Program, index: Any, gradients: Any, loss: jax.Array, aux: Any) -> dict[str, Any]:
    made: dict[str, Callable[[], Any]] = {
        "activations": lambda: aux["activations"],
        "gradients": lambda: gradients[losses.last_layers(p)],
        "index": lambda: jnp.asarray(index, jnp.int32) * 2,
        "losses": lambda: (loss, aux["mean"]),
        "norms": lambda: jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g * g)), gradients),
        "stacked": lambda: gradients,
    }
    return {name: made[name]() for name in (*p.metrics, p.accumulation) if name in made}
