"""A tiny model that is a chain (embedding, layers, head), and its train step with and without a pipeline.

    tokens [rows, SEQ]  ->  embedding [VOCAB, WIDTH]  ->  layers [L, ...] (lax.scan)  ->  scale [WIDTH], head  ->  loss

`Axes` names the mesh axes over which the model's code communicates. With `ends`, embedding and head are split over the
vocabulary by that axis, so the pipeline computes them on all stages together. Everything runs under `shard_map` with
`check_vma=False`, so each device holds the cotangent of its own work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix import Fold
from dhelix.passes.pipeline_fold import INTERLEAVED, Layout
from dhelix.runtime.step.microbatches.value_and_grad import microbatching

VOCAB, WIDTH, HIDDEN, SEQ = 16, 8, 16, 4
STEPS = 5
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
Params = dict[str, Any]
Loss = Callable[..., Any]


@dataclass(frozen=True)
class Axes:
    """Names of mesh axes: of the layers' tensor parallelism, and of the vocabulary's shards. None: not split."""

    tp: str | None = None
    ends: str | None = None


def _enter(x: jax.Array, axis: str | None) -> jax.Array:
    """x, equal on all devices of `axis`. Each device does a part of the following work, so backward sums cotangents."""
    return x if axis is None else _with_derivative(lambda x: x, lambda g: lax.psum(g, axis))(x)


def _leave(x: jax.Array, axis: str | None) -> jax.Array:
    """The sum of parts. The sum is equal on every device, and so is its cotangent."""
    return x if axis is None else _with_derivative(lambda x: lax.psum(x, axis), lambda g: g)(x)


def _with_derivative(function: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., jax.Array]:
    differentiable = jax.custom_vjp(function)
    differentiable.defvjp(lambda x: (function(x), None), lambda _, g: (backward(g),))
    return differentiable


def init_params(layers: int) -> Params:
    random = np.random.RandomState(layers)

    def draw(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / math.sqrt(shape[-2])).astype(np.float32)

    return {
        "embedding": 4 * draw(VOCAB, WIDTH),
        "layers": {
            "norm": np.ones((layers, WIDTH), np.float32),
            "w_in": draw(layers, WIDTH, HIDDEN),
            "w_out": 0.5 * draw(layers, HIDDEN, WIDTH),
        },
        "scale": np.ones(WIDTH, np.float32),
        "head": draw(WIDTH, VOCAB),
    }


def tokens(rows: int) -> np.ndarray:
    return np.random.RandomState(rows).randint(0, VOCAB, (rows, SEQ + 1)).astype(np.int32)


def layer(x: jax.Array, w: Params, axes: Axes = Axes()) -> jax.Array:
    """A residual block of two matrices; `w_in` and `w_out` are split along HIDDEN over `axes.tp`."""
    x_normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w["norm"]
    out = jnp.tanh(_enter(x_normed, axes.tp) @ w["w_in"]) @ w["w_out"]
    return x + _leave(out, axes.tp)


def embed(params: Params, ids: jax.Array, axes: Axes = Axes()) -> jax.Array:
    table = params["embedding"]
    if axes.ends is None:
        return table[ids]
    # Only one stage's cotangent of this sum is not zero. The transpose of psum is a sum, so all stages get it.
    local = ids - lax.axis_index(axes.ends) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    return lax.psum(jnp.where(mine[..., None], table[local % table.shape[0]], 0), axes.ends)


def nll(params: Params, x: jax.Array, targets: jax.Array, axes: Axes = Axes()) -> jax.Array:
    """Cross-entropy of each token, [rows, SEQ]."""
    if axes.ends is not None:
        x = lax.psum(x, axes.ends)  # zero except on the stage that made it
    logits = (x * params["scale"]) @ params["head"]
    first = 0 if axes.ends is None else lax.axis_index(axes.ends) * logits.shape[-1]
    chosen = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None] - first, logits, 0).sum(axis=-1)
    return jnp.log(_leave(jnp.exp(logits).sum(axis=-1), axes.ends)) - _leave(chosen, axes.ends)


def loss(params: Params, rows: jax.Array, axes: Axes = Axes()) -> jax.Array:
    x = embed(params, rows[:, :-1], axes)
    x, _ = lax.scan(lambda x, w: (layer(x, w, axes), None), x, params["layers"])
    return jnp.mean(nll(params, x, rows[:, 1:], axes))


@dataclass(frozen=True)
class Setting:
    """A pipelined train step of the model above.

    Attributes:
      rows: rows of one micro-batch on one device.
      shared: the ends are split over the pipeline axis.
    """

    pp: int
    microbatches: int
    layers: int
    tp: int = 1
    dp: int = 1
    rows: int = 4
    shared: bool = False
    schedule: str = "w"
    sends_beside: bool = False
    chunks: int = 2

    @property
    def name(self) -> str:
        schedule = self.schedule + (str(self.chunks) if self.schedule in INTERLEAVED else "")
        how = "_shared" * self.shared + "_sends_beside" * self.sends_beside
        return f"{schedule}_pp{self.pp}_tp{self.tp}_dp{self.dp}_M{self.microbatches}_L{self.layers}{how}"

    @property
    def fold(self) -> Fold:
        return Fold(self.pp, self.layers, self.schedule, self.chunks, sends_beside=self.sends_beside)

    @property
    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: self.pp * self.tp * self.dp]).reshape(self.pp, self.dp, self.tp)
        return Mesh(devices, ("pp", "dp", "tp"), axis_types=(AxisType.Auto,) * 3)

    @property
    def batch(self) -> np.ndarray:
        return tokens(self.rows * self.microbatches * self.dp)

    @property
    def specs(self) -> Params:
        """Specs of the folded parameters."""
        vocabulary = "pp" if self.shared else None
        return {
            "embedding": P(vocabulary),
            "layers": {"norm": P("pp"), "w_in": P("pp", None, None, "tp"), "w_out": P("pp", None, "tp")},
            "scale": P(),
            "head": P(None, vocabulary),
        }

    @property
    def model_loss(self) -> Loss:
        return functools.partial(loss, axes=Axes("tp" if self.tp > 1 else None, "pp" if self.shared else None))

    @property
    def alone(self) -> Setting:
        """The setting whose `plain_steps` this one's steps should equal."""
        return replace(self, pp=1, tp=1, dp=1, rows=self.rows * self.dp, shared=False, schedule="w", chunks=2)


def gradients_of(
    loss_fn: Loss, mesh: Mesh, specs: Any, arguments: tuple[Any, ...] = (P("dp"),), **options: Any
) -> Callable[..., Any]:
    """`(params, *arguments) -> dhelix.value_and_grad(loss_fn, **options)` under `shard_map`, for folded parameters.

    Gradients of parameters that are on several stages are summed, and everything is averaged over the axis dp.
    """

    def local(params: Any, *rest: Any) -> Any:
        value, grads = dhelix.value_and_grad(loss_fn, **options)(params, *rest)
        grads = jax.tree.map(lambda g, spec: g if "pp" in tuple(spec) else lax.psum(g, "pp"), grads, specs)
        return jax.tree.map(lambda x: lax.pmean(x, "dp") if "dp" in mesh.shape else x, (value, grads))

    return jax.shard_map(local, mesh=mesh, in_specs=(specs, *arguments), out_specs=(P(), specs), check_vma=False)


def apply(state: Any, grads: Any) -> Any:
    params, moments = state
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments


def initial_state(layers: int) -> Any:
    params = init_params(layers)
    return params, OPTIMIZER.init(params)


def pipelined_step(setting: Setting) -> Callable[[Any, jax.Array], Any]:
    """The train step, not jitted: (folded state, batch) -> (state, loss)."""
    gradients = gradients_of(setting.model_loss, setting.mesh, setting.specs)

    def train_step(state: Any, rows: jax.Array) -> Any:
        value, grads = gradients(state[0], rows)
        return apply(state, grads), value

    return train_step


def plain_step(state: Any, rows: jax.Array) -> Any:
    """The same step on one device, with its micro-batches in a loop."""
    value, grads = dhelix.value_and_grad(loss)(state[0], rows)
    return apply(state, grads), value


def in_microbatches(function: Callable[..., Any], count: int, reduce: str = "mean", fold: Fold | None = None) -> Any:
    """`function` jitted as `strand_interleave` traces it, but without the passes, which take long.

    Also without LLVM's optimizations, because compilation is faster and results are compared with a tolerance.
    """

    def traced(*args: Any) -> Any:
        with microbatching(count, reduce, fold):
            return function(*args)

    return jax.jit(traced, compiler_options={"xla_backend_optimization_level": 0})


def run(step: Any, state: Any, batch: np.ndarray) -> tuple[Any, list[float]]:
    """State and losses of STEPS optimizer steps. States go to the host in between, so one program runs all steps."""
    losses = []
    for _ in range(STEPS):
        state, value = jax.tree.map(np.asarray, step(state, batch))
        losses.append(float(value))
    return state, losses


def pipelined_steps(setting: Setting) -> tuple[Any, list[float]]:
    """`run` of the pipelined step, with the state in the model's order."""
    step = in_microbatches(pipelined_step(setting), setting.microbatches, fold=setting.fold)
    layout = setting.fold.layout()
    state, losses = run(step, folded(initial_state(setting.layers), layout), setting.batch)
    return unfolded(state, layout), losses


@functools.cache
def plain_steps(setting: Setting) -> tuple[Any, list[float]]:
    """`run` of the plain step."""
    return run(in_microbatches(plain_step, setting.microbatches), initial_state(setting.layers), setting.batch)


def folded(tree: Any, layout: Layout) -> Any:
    """`tree` with its arrays of layers in pipeline order: chunk by chunk, stage by stage, padded with zeros."""

    def fold_array(x: Any) -> np.ndarray:
        result = np.zeros((layout.chunks, layout.padded, *x.shape[1:]), x.dtype)
        for row, chunk in enumerate(_chunks(layout)):
            layers = layout.layers_of(chunk)
            result[row, : len(layers)] = x[layers.start : layers.stop]
        return result

    return _map_layers(fold_array, tree)


def unfolded(tree: Any, layout: Layout) -> Any:
    """The inverse of `folded`."""

    def unfold_array(x: Any) -> np.ndarray:
        rows = {chunk: x[row, : layout.chunk_layers[chunk]] for row, chunk in enumerate(_chunks(layout))}
        return np.concatenate([np.asarray(rows[chunk]) for chunk in range(layout.chunks)])

    return _map_layers(unfold_array, tree)


def _chunks(layout: Layout) -> list[int]:
    return [chunk for stage in range(layout.stages) for chunk in layout.chunks_of(stage)]


def _map_layers(function: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(leaf) if jax.tree_util.DictKey("layers") in path else leaf, tree
    )


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Asserts that every leaf has the same type and is within `tolerance` of its largest magnitude."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, want), got in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        assert jnp.result_type(want) == jnp.result_type(got), path
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        np.testing.assert_allclose(
            got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30), err_msg=jax.tree_util.keystr(path)
        )
