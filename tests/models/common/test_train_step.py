"""The sharded train step compared with a dense model that is written out here; its shardings, types and errors."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from dhelix.models import Llama, LlamaConfig, Training, TrainState, make_mesh, make_train_step
from dhelix.models.common.parallel import AutoParallel
from dhelix.models.llama.model import init_params, param_specs
from dhelix.tests.models.tiny import TINY

CONFIG = TINY
MICROBATCHES = 2
ROWS = 8


# The tests only compare values, so optimization by LLVM would cost more time than it saves.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tokens(rows: int = ROWS, seq: int = CONFIG.seq) -> Any:
    return np.random.default_rng(7).integers(0, CONFIG.vocab, (rows, seq + 1)).astype(np.int32)


def rough_params(config: LlamaConfig) -> Any:
    """Random parameters: norms from 0.5 to 1.5, other weights with standard deviation 0.1. So no gradient is small."""
    generator = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_norm = "norm" in jax.tree_util.keystr(path)
        values = generator.uniform(0.5, 1.5, leaf.shape) if is_norm else generator.normal(0, 0.1, leaf.shape)
        return values.astype(leaf.dtype)

    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def dense_loss(config: LlamaConfig, params: Any, rows: Any) -> jax.Array:
    """Llama 3 in its textbook form: one device, one batch, attention written out."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    seq, half = inputs.shape[1], config.head_dim // 2

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + config.norm_eps) * weight

    def rope(x: jax.Array) -> jax.Array:
        angle = jnp.arange(seq)[:, None] * config.rope_theta ** (-jnp.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, None]
        return jnp.concatenate([turned.real, turned.imag], -1)

    x = params["embedding"][inputs]
    for layer in range(config.layers):
        w = (
            {name: stacked[layer] for name, stacked in params["layers"].items()}
            if config.scan_layers
            else params["layers"][layer]
        )
        h = norm(x, w["attention_norm"])
        query, key, value = (jnp.einsum("bsh,hnd->bsnd", h, w[name]) for name in ("wq", "wk", "wv"))
        key, value = (jnp.repeat(a, config.heads // config.kv_heads, axis=2) for a in (key, value))
        scores = jnp.einsum("bsnd,btnd->bnst", rope(query), rope(key)) / math.sqrt(config.head_dim)
        scores = jnp.where(jnp.tri(seq, dtype=bool), scores, -jnp.inf)
        out = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1), value)
        x = x + jnp.einsum("bsnd,ndh->bsh", out, w["wo"])
        h = norm(x, w["ffn_norm"])
        x = x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
    head = params["embedding"].T if config.tie_embeddings else params["head"]
    logits = norm(x, params["final_norm"]) @ head
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def gradients_only() -> optax.GradientTransformation:
    """An optimizer that does not change the parameters. Its state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
    )


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Checks that each leaf differs by at most `tolerance` times its largest expected magnitude."""

    def compare(path: Any, a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(compare, actual, expected)


@pytest.mark.parametrize(
    ("sharding", "dp", "tp", "overrides"),
    [
        pytest.param("shard_map", 2, 4, {}, marks=pytest.mark.slow),
        pytest.param("shard_map", 2, 4, {"remat": "full"}, marks=pytest.mark.slow),
        ("shard_map", 4, 2, {"kv_heads": 2, "tie_embeddings": True, "scan_layers": False}),
        pytest.param("auto", 2, 4, {}, marks=pytest.mark.slow),
        ("auto", 4, 2, {"kv_heads": 2, "tie_embeddings": True, "remat": "dots_saveable"}),
        pytest.param("fsdp", 4, 2, {"kv_heads": 2}, marks=pytest.mark.slow),
        ("fsdp", 4, 1, {"tie_embeddings": True, "scan_layers": False}),
    ],
)
def test_loss_and_gradients_are_those_of_the_dense_model(
    sharding: Any, dp: int, tp: int, overrides: dict[str, Any]
) -> None:
    config = dataclasses.replace(CONFIG, **overrides)
    training = make_train_step(config, make_mesh(dp, tp), gradients_only(), MICROBATCHES, sharding)
    params = rough_params(config)
    state = jax.device_put(TrainState(params, params, jnp.int32(0)), training.state_shardings)
    state, metrics = fast_jit(training.train_step)(state, {"tokens": tokens()})

    loss, gradients = fast_jit(jax.value_and_grad(lambda p: dense_loss(config, p, tokens())))(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradients), rtol=1e-5)
    assert_close(state.opt_state, gradients, 1e-5)


def test_parameters_and_optimizer_states_are_split_over_dp_too_where_that_is_asked_for() -> None:
    """dp splits each matrix along its first dimension that is whole and divisible, but never along the layers.

    Norms are not split.
    """

    def bytes_of_one_device(sharding: Any) -> int:
        state = make_train_step(CONFIG, make_mesh(4, 2), optax.adam(1e-3), 1, sharding).abstract_state()
        arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)

    assert bytes_of_one_device("fsdp") < 1.2 * bytes_of_one_device("auto") / 4
    specs = make_train_step(CONFIG, make_mesh(4, 2), optax.adam(1e-3), 1, "fsdp").state_shardings.params
    found = {name: array.spec for name, array in specs["layers"].items()}
    assert found["wo"] == PartitionSpec(None, "tp", "dp")
    assert found["w_up"] == PartitionSpec(None, "dp", "tp") and found["ffn_norm"] == PartitionSpec()


@functools.cache
def usual_training() -> Training:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    return make_train_step(config, make_mesh(2, 4), optax.adamw(1e-2), MICROBATCHES)


@pytest.mark.slow
def test_training_lowers_the_loss_and_keeps_types_and_shardings() -> None:
    training = usual_training()
    step, state = fast_jit(training.train_step, donate_argnums=0), training.init(jax.random.key(0))
    losses = []
    for _ in range(20):
        state, metrics = step(state, {"tokens": tokens()})
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] - math.log(CONFIG.vocab)) < 0.1
    assert losses[-1] < losses[0] / 2
    assert int(state.step) == 20
    kinds = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(state)]
    abstract = jax.tree.leaves(training.abstract_state())
    assert kinds == [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in abstract]


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_sixteen_bit_compute_has_a_float32_optimizer_state(param_dtype: str) -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype=param_dtype)
    training = make_train_step(config, make_mesh(2, 4), optax.adamw(1e-3), MICROBATCHES)
    state, metrics = jax.eval_shape(training.train_step, training.abstract_state(), training.abstract_batch(ROWS))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(param_dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} == {jnp.dtype("float32")}
    assert metrics["loss"].dtype == jnp.float32


def collectives(jaxpr: Any, in_loop: bool = False) -> list[tuple[str, bool]]:
    """Names of a program's collectives, and whether each one is inside a scan."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if any(word in name for word in ("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all")):
            found.append((name, in_loop))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += collectives(inner, in_loop or name == "scan")
    return found


def test_the_loops_sum_over_devices_in_the_cross_entropy_only() -> None:
    training = make_train_step(CONFIG, make_mesh(2, 4), optax.sgd(0.1), MICROBATCHES)
    arguments = training.abstract_state(), training.abstract_batch(ROWS)
    found = collectives(jax.make_jaxpr(training.train_step)(*arguments).jaxpr)
    in_loops = [name for name, in_loop in found if in_loop and "gather" not in name and "scatter" not in name]
    assert sorted(name.split("_")[0] for name in in_loops) == ["pmax", "psum"]
    # Every leaf and the loss are summed once: over dp, and the loss and the three norms also over tp.
    after = [name for name, in_loop in found if not in_loop]
    assert len(after) == len(jax.tree.leaves(param_specs(CONFIG))) + 1


def test_a_step_compiles_without_arrays() -> None:
    training = make_train_step(CONFIG, make_mesh(2, 4), optax.sgd(0.1), MICROBATCHES)
    step = fast_jit(training.train_step, donate_argnums=0)
    compiled = step.lower(training.abstract_state(), training.abstract_batch(ROWS)).compile()
    arguments, _ = compiled.input_shardings
    assert jax.tree.leaves(arguments[0]) == jax.tree.leaves(training.state_shardings)


def test_the_module_takes_nnx_gradients() -> None:
    rows, params = tokens(2), rough_params(CONFIG)
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, {"weights": params})

    @fast_jit
    def both(state: nnx.State, params: Any):
        def loss(model: Llama) -> jax.Array:
            return model.loss(rows[:, :-1], rows[:, 1:])

        ours = nnx.value_and_grad(loss)(nnx.merge(graph, state))
        return ours, jax.value_and_grad(lambda p: dense_loss(CONFIG, p, rows))(params)

    (loss, gradients), (expected, dense) = both(state, params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    by_path = {path: leaf[...] for path, leaf in nnx.to_flat_state(gradients)}
    assert_close(by_path["weights", "layers", "wq"], dense["layers"]["wq"], 1e-5)
    logits = jax.eval_shape(lambda state: nnx.merge(graph, state)(rows[:, :-1]), state)
    assert logits.shape == (2, CONFIG.seq, CONFIG.vocab)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_module_carries_its_shardings(scan_layers: bool) -> None:
    config, mesh = dataclasses.replace(CONFIG, scan_layers=scan_layers), make_mesh(2, 4)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), parallel=AutoParallel(mesh)))
    graph, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    expected = jax.tree.leaves(param_specs(config))
    assert jax.tree.leaves(specs) == expected
    merged = nnx.merge(graph, state)
    assert jax.tree.structure(merged.params) == jax.tree.structure(param_specs(config))


def test_initial_values_depend_neither_on_the_mesh_nor_on_the_scan() -> None:
    key, unrolled_config = jax.random.key(3), dataclasses.replace(CONFIG, scan_layers=False)
    dense, unrolled = fast_jit(lambda key: (init_params(CONFIG, key), init_params(unrolled_config, key)))(key)
    sharded = usual_training().init(key).params
    assert_close(sharded, dense, 1e-6)
    for name, stacked in dense["layers"].items():
        assert_close(np.stack([layer[name] for layer in unrolled["layers"]]), stacked, 1e-6)


@pytest.mark.parametrize(
    ("dp", "tp", "overrides", "rows", "seq", "says"),
    [
        (2, 4, {"kv_heads": 2}, 8, 16, "kv_heads = 2 is not divisible by tp = 4"),
        (2, 4, {"vocab": 62}, 8, 16, "vocab = 62 is not divisible"),
        (2, 4, {}, 6, 16, "use a multiple of 4 rows"),
        (2, 4, {}, 8, 18, "is not divisible by tp 4"),
        (4, 4, {}, 8, 16, "needs 16 devices"),
    ],
)
def test_what_does_not_divide_is_refused(
    dp: int, tp: int, overrides: dict[str, Any], rows: int, seq: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        config = dataclasses.replace(CONFIG, **overrides)
        training = make_train_step(config, make_mesh(dp, tp), optax.sgd(0.1), MICROBATCHES)
        jax.eval_shape(training.train_step, training.abstract_state(), training.abstract_batch(rows, seq))


def test_other_meshes_and_shardings_are_refused() -> None:
    with pytest.raises(ValueError, match="make_mesh"):
        make_train_step(CONFIG, jax.make_mesh((8,), ("x",)), optax.sgd(0.1), 1)
    with pytest.raises(ValueError, match="'shard_map', 'auto' or 'fsdp'"):
        make_train_step(CONFIG, make_mesh(2, 4), optax.sgd(0.1), 1, "zero")  # pyright: ignore
    with pytest.raises(ValueError, match="microbatches is 0"):
        make_train_step(CONFIG, make_mesh(2, 4), optax.sgd(0.1), 0)
