"""Three optimizer steps of GPT, Phi-2 and MPT: any mesh against one device, strands against the plain step."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dhelix import strand_interleave
from dhelix.launch.train.meshes.pipelined import PipelinedTraining, make_pipelined_step
from dhelix.models import GptConfig, Training, TrainState, make_mesh, make_train_step
from dhelix.models.gpt.gpt_config import GPT_PRESETS
from dhelix.models.gpt.model import init_params
from dhelix.tests.quick import slow_but

SIZES = dict(vocab=64, hidden=32, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=48, seq=16, dtype="float32")
GPT, PHI, MPT = (
    dataclasses.replace(GPT_PRESETS[name], **SIZES, **more)  # pyright: ignore
    for name, more in (("gpt-6.7b", {}), ("phi-2", {"rotary_dim": 4}), ("mpt-7b", {}))
)
MODELS = {"gpt": GPT, "phi": PHI, "mpt": MPT}
MICROBATCHES = 3
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9))


def batch(segments: bool) -> dict[str, Any]:
    """Rows of tokens. With `segments`, a row has two documents and ends with padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (12, 17)).astype(np.int32)
    if not segments:
        return {"tokens": tokens}
    ends = np.sort(random.integers(1, 17, (12, 2, 1)), axis=1)
    place = np.arange(17)
    return {"tokens": tokens, "segments": np.where(place < ends[:, 0], 1, np.where(place < ends[:, 1], 2, 0))}


def rough(config: GptConfig) -> Any:
    """Random parameters whose biases and norms count, too."""
    random = np.random.default_rng(1)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        middle = 1.0 if jax.tree_util.keystr(path).endswith("norm']") else 0.0
        return random.normal(middle, 0.1, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: init_params(config, jax.random.key(0))))


def trained(training: Training, strands: bool = False, segments: bool = False) -> tuple[Any, list[dict[str, float]]]:
    """The parameters in the model's order after three steps, and the metrics of these steps."""
    params = rough(training.config)  # pyright: ignore
    state: Any = TrainState(params, OPTIMIZER.init(params), jax.numpy.int32(0))
    step: Any = jax.jit(training.train_step)
    if isinstance(training, PipelinedTraining):
        shardings = jax.tree.map(lambda x: x.sharding, training.to_model_order(training.abstract_state()))
        state = training.from_model_order(jax.device_put(state, shardings))
        step = strand_interleave(training.train_step, microbatches=MICROBATCHES, pipeline=training.fold)
    else:
        state = jax.device_put(state, training.state_shardings)
        step = strand_interleave(training.train_step, strict=True) if strands else step
    given, found = {name: np.asarray(x, np.int32) for name, x in batch(segments).items()}, []
    for _ in range(3):
        state, metrics = step(state, jax.device_put(given, training.batch_sharding))
        found.append({name: float(value) for name, value in metrics.items()})
    return jax.device_get(training.to_model_order(state).params), found


@functools.cache
def plain(
    config: GptConfig, dp: int = 1, tp: int = 1, cp: int = 1, strands: bool = False, segments: bool = False,
    sharding: Any = "shard_map", context: Any = "ring",
) -> tuple[Any, list[dict[str, float]]]:  # fmt: skip
    mesh = make_mesh(dp, tp, cp=cp)
    training = make_train_step(config, mesh, OPTIMIZER, MICROBATCHES, sharding, context)
    return trained(training, strands, segments)


def assert_alike(one: tuple[Any, list[dict[str, float]]], other: tuple[Any, list[dict[str, float]]]) -> None:
    (params, metrics), (expected, wanted) = one, other
    for found, like in zip(metrics, wanted, strict=True):
        assert found == pytest.approx(like, rel=2e-5)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, like, rtol=1e-3, atol=2e-5, err_msg=jax.tree_util.keystr(path))


CASES = [
    ("gpt", {"dp": 2, "tp": 2}),
    ("mpt", {"dp": 2, "tp": 2, "segments": True}),
    ("gpt", {"tp": 2, "cp": 2, "segments": True}),
    ("mpt", {"tp": 2, "cp": 2, "segments": True}),
    ("phi", {"tp": 2, "cp": 2}),
    ("mpt", {"tp": 2, "cp": 4, "context": "scanned-ring"}),
    ("gpt", {"tp": 2, "cp": 2, "context": "all-gather"}),
    ("phi", {"dp": 2, "tp": 2, "sharding": "auto"}),
    ("gpt", {"dp": 2, "tp": 2, "cp": 2, "sharding": "fsdp"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(CASES[1:3], CASES), ids=str)
def test_any_mesh_trains_as_one_device(case: tuple[str, dict[str, Any]]) -> None:
    name, mesh = case
    expected = plain(MODELS[name], segments=mesh.get("segments", False))
    assert_alike(plain(MODELS[name], **mesh), expected)
    assert expected[1][-1]["loss"] < expected[1][0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_strands_train_as_the_plain_step(name: str) -> None:
    assert_alike(plain(MODELS[name], dp=2, tp=2, strands=True), plain(MODELS[name], dp=2, tp=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "choices"),
    [
        ("gpt", 5, {}),  # identity layers fill the chunks, and their biases must stay zero
        ("mpt", 4, {"schedule": "1f1b"}),
        ("phi", 4, {"sharding": "auto"}),
    ],
)
def test_a_pipeline_trains_as_one_device(name: str, layers: int, choices: dict[str, Any]) -> None:
    config = dataclasses.replace(MODELS[name], layers=layers)
    training = make_pipelined_step(config, make_mesh(2, 2, pp=2), OPTIMIZER, MICROBATCHES, **choices)
    assert_alike(trained(training), plain(config))


def test_tables_of_words_and_positions_are_split_and_the_biases_of_rows_are_not() -> None:
    config = dataclasses.replace(GPT, head_bias=True)
    training = make_train_step(config, make_mesh(2, 2), optax.sgd(0.1), MICROBATCHES, "fsdp")
    specs = jax.tree.map(lambda x: tuple(x.spec), training.state_shardings.params)
    assert specs["embedding"] == specs["positions"] == ("tp", "dp") and specs["head_bias"] == ("tp",)
    layers = specs["layers"]
    assert layers["bq"] == layers["b_up"] == (None, "tp") and layers["bo"] == layers["b_down"] == ()
    assert layers["wo"] == (None, "tp", "dp")


@pytest.mark.parametrize(
    ("config", "mesh", "says"),
    [
        (dataclasses.replace(GPT, seq=18), {"tp": 4}, "seq = 18 is not divisible by tp = 4"),
        (GPT, {"tp": 2, "ep": 2}, "the model has no experts; leave ep out"),
    ],
)
def test_what_does_not_fit_is_one_error(config: GptConfig, mesh: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_train_step(config, make_mesh(1, **mesh), optax.sgd(0.1), MICROBATCHES)


@pytest.mark.parametrize("cp", [1, 2])
def test_rows_longer_than_the_table_of_positions_are_refused(cp: int) -> None:
    training = make_train_step(GPT, make_mesh(1, 2, cp=cp), optax.sgd(0.1), MICROBATCHES)
    with pytest.raises(ValueError, match="rows of 32 tokens have no positions in a table of seq = 16"):
        jax.eval_shape(training.train_step, training.abstract_state(), training.abstract_batch(6, 32))
    jax.eval_shape(training.train_step, training.abstract_state(), training.abstract_batch(6, 8))


def exchanges(jaxpr: Any, in_layers: bool = False) -> list[str]:
    """The names of the collectives in the loops over layers."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if in_layers and any(word in name for word in ("psum", "pmax", "all_gather", "reduce_scatter")):
            found.append(name)
        is_layers = name == "scan" and equation.params["length"] == GPT.layers
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += exchanges(inner, in_layers or is_layers)
    return found


@pytest.mark.parametrize(("name", "pairs"), [("gpt", 2), ("phi", 1), ("mpt", 2)])
def test_a_layer_exchanges_by_gathers_and_scatters_alone(name: str, pairs: int) -> None:
    """A parallel block has one of each. The gradients of replicated biases are summed once per step, not per layer."""
    training = make_train_step(MODELS[name], make_mesh(2, 2), optax.sgd(0.1), MICROBATCHES)
    jaxpr = jax.make_jaxpr(training.train_step)(training.abstract_state(), training.abstract_batch(12))
    found = exchanges(jaxpr.jaxpr)
    assert len(found) == 4 * pairs  # forward and backward
    assert sum("all_gather" in each for each in found) == sum("scatter" in each for each in found) == 2 * pairs
