"""Attention of sequences that devices share, against whole attention; five optimizer steps against one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from dhelix import strand_interleave
from dhelix.launch.train.meshes.pipelined import make_pipelined_step
from dhelix.models.common import attention_blocks
from dhelix.models.common.attention_blocks import Block
from dhelix.models.common.context_parallel import Context, Exchange
from dhelix.models.common.decoder_config import DecoderConfig
from dhelix.models.common.mesh import make_mesh
from dhelix.models.common.parallel import SINGLE_DEVICE
from dhelix.models.llama import model
from dhelix.models.moe.moe_config import MOE_PRESETS
from dhelix.models.train_step import Sharding, make_train_step, objective_of
from dhelix.tests.models.tiny import TINY
from dhelix.tests.quick import slow_but

LLAMA = dataclasses.replace(TINY, kv_heads=2)
EXPERTS = dataclasses.replace(
    MOE_PRESETS["phi-moe-demo"], vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=16, seq=16,
    capacity_factor=8.0, balance_weight=0.0, z_weight=0.0,
)  # fmt: skip
"""Nothing is dropped, and no loss depends on how tokens are divided among devices."""
MICROBATCHES = 2
OPTIMIZER = optax.sgd(0.5, momentum=0.9)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def documents(rows: int, length: int) -> np.ndarray:
    """Numbers of documents of different lengths. Every second row ends with padding."""
    starts = np.random.default_rng(1).random((rows, length)) < 0.2
    segments = 1 + np.cumsum(starts, axis=1)
    segments[::2, -length // 5 :] = 0
    return segments.astype(np.int32)


@functools.partial(jax.jit, static_argnames="causal")
def whole(
    query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array, mask: jax.Array | None, causal: bool
) -> tuple[jax.Array, ...]:
    """JAX's attention, and the cotangents of query, key and value."""
    mask = None if mask is None else mask[:, None]
    attention = functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=causal)
    out, pull = jax.vjp(attention, query, key, value)
    return out, *pull(cotangent)


forward = jax.jit(attention_blocks.forward, static_argnums=0)
backward = jax.jit(attention_blocks.backward, static_argnums=0)


# ---- blocks


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_block_alone_is_attention_with_its_gradients(causal: bool, masked: bool) -> None:
    query, key, value, cotangent = (random(2, 8, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2, 4)))
    mask = (documents(2, 8)[:, :, None] == documents(2, 8)[:, None, :]) if masked else None
    block = Block(causal, "xla")
    expected = whole(query, key, value, cotangent, mask, causal=causal)
    out, log_sums = forward(block, query, key, value, mask)
    found = out, *backward(block, query, key, value, out, log_sums, cotangent, mask)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_blocks_of_different_keys_add_up_to_the_whole() -> None:
    query, cotangent = random(1, 4, 2, 8), random(1, 4, 2, 8, seed=1)
    keys, values = random(1, 12, 1, 8, seed=2), random(1, 12, 1, 8, seed=3)
    block = Block(False, "xla")
    expected, *gradients = whole(query, keys, values, cotangent, None, causal=False)
    parts = [(keys[:, part], values[:, part]) for part in (slice(0, 4), slice(4, 12))]
    results = [forward(block, query, *part) for part in parts]
    log_sums = jnp.logaddexp(results[0][1], results[1][1])
    out = sum(out * jnp.exp(sums - log_sums).swapaxes(1, 2)[..., None] for out, sums in results)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    addends = [backward(block, query, *part, expected, log_sums, cotangent) for part in parts]
    found = (
        addends[0][0] + addends[1][0],
        *(jnp.concatenate([one, two], axis=1) for one, two in zip(addends[0][1:], addends[1][1:], strict=True)),
    )
    for one, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_score_of_a_hidden_key_is_finite(dtype: str) -> None:
    assert jnp.isfinite(jnp.asarray(attention_blocks.masked_score(dtype), dtype))


# ---- parts of a sequence


def over_devices(size: int, function: Any) -> Any:
    """Returns the results of `function` on `size` devices, which all have its arguments, one after the other."""
    mesh, parts = make_mesh(1, 1, cp=size), PartitionSpec("cp")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=parts, check_vma=False))


def order(size: int, seq: int) -> np.ndarray:
    """The positions of the tokens of each device, `[devices, seq / devices]`."""
    context = Context(size)
    return np.asarray(over_devices(size, lambda: context.positions(seq // size)[None])())


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_cover_each_position_once_with_equal_work(size: int) -> None:
    seq, context = 24, Context(size)
    positions = order(size, seq)
    assert sorted(positions.flatten()) == list(range(seq))
    visible = (positions + 1).sum(axis=1)  # a token sees itself and all tokens before it
    assert set(visible) == {seq * (seq + 1) // 2 // size}
    rows = jnp.arange(2 * seq).reshape(2, seq)
    parts = over_devices(size, lambda x: context.own_part(x)[None])(rows)
    np.testing.assert_array_equal(parts, np.stack([rows[:, own] for own in positions]))


SEQ = 16


def arguments(packed: bool, dtype: str = "float32") -> tuple[list[jax.Array], jax.Array | None]:
    """Query, key, value and cotangent of the output; and segments."""
    arrays = [random(2, SEQ, heads, 8, seed=n).astype(dtype) for n, heads in enumerate((4, 2, 2, 4))]
    return arrays, jnp.asarray(documents(2, SEQ)) if packed else None


def on_device(context: Context, segments: Any, slopes: Any, *arrays: jax.Array) -> Any:
    """A device's attention, and its cotangents of query, key and value."""
    q, k, v, d_out = (x[:, context.positions(SEQ // context.size)] for x in arrays)
    out, pull = jax.vjp(lambda q, k, v: context.attention(q, k, v, segments, "xla", slopes), q, k, v)
    return jax.tree.map(lambda x: x[None], (out, *pull(d_out)))


def attention(exchange: Exchange, size: int, segments: Any = None, slopes: Any = None) -> Any:
    return over_devices(size, functools.partial(on_device, Context(size, exchange), segments, slopes))


@pytest.mark.parametrize(
    ("exchange", "size", "packed"),
    [
        pytest.param("ring", 2, True, marks=pytest.mark.slow),
        pytest.param("ring", 4, False, marks=pytest.mark.slow),
        ("ring", 4, True),
        pytest.param("scanned-ring", 2, True, marks=pytest.mark.slow),
        ("scanned-ring", 4, False),
        pytest.param("scanned-ring", 8, True, marks=pytest.mark.slow),
        pytest.param("all-gather", 2, False, marks=pytest.mark.slow),
        ("all-gather", 4, True),
    ],
)
def test_shared_attention_is_whole_attention_with_its_gradients(exchange: Exchange, size: int, packed: bool) -> None:
    arrays, segments = arguments(packed)
    mask = None if segments is None else segments[:, :, None] == segments[:, None, :]
    expected = whole(*arrays, mask, causal=True)
    assert_parts(attention(exchange, size, segments)(*arrays), expected, size)


def assert_parts(found: Any, expected: Any, size: int) -> None:
    """`found` are the parts of each device, in zigzag order, and `expected` are the whole arrays."""
    positions = order(size, SEQ)
    for one, other in zip(found, expected, strict=True):
        for part, own in zip(one, positions, strict=True):
            np.testing.assert_allclose(part, other[:, own], rtol=1e-4, atol=1e-5)


SLOPES = np.array([0.7, 0.5, 0.2, 0.1], np.float32)


def alone_with_slopes(arrays: list[jax.Array], segments: jax.Array | None, implementation: Any = "xla") -> Any:
    """Attention of one device with ALiBi, and its cotangents of query, key and value."""
    mask = None if segments is None else segments[:, :, None] == segments[:, None, :]
    block = Block(True, implementation)
    out, pull = jax.vjp(lambda *qkv: attention_blocks.attention(block, *qkv, mask, SLOPES), *arrays[:3])
    return out, *pull(arrays[3])


@pytest.mark.parametrize("exchange", slow_but(["scanned-ring"], ["ring", "scanned-ring", "all-gather"]))
def test_shared_attention_with_alibi_is_that_of_one_device(exchange: Exchange) -> None:
    arrays, segments = arguments(packed=True)
    assert_parts(attention(exchange, 4, segments, SLOPES)(*arrays), alone_with_slopes(arrays, segments), 4)


@pytest.mark.parametrize("packed", [True, False])
def test_attention_with_alibi_is_attention_with_a_bias(packed: bool) -> None:
    arrays, segments = arguments(packed)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    bias = SLOPES[:, None, None] * (np.arange(SEQ) - np.arange(SEQ)[:, None])

    def expected(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, bias[None], mask, is_causal=True)

    out, pull = jax.vjp(expected, *arrays[:3])
    for one, other in zip(alone_with_slopes(arrays, segments), (out, *pull(arrays[3])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_bias_of_alibi_has_no_gradient() -> None:
    arrays, _ = arguments(packed=False, dtype="bfloat16")
    made = jax.make_jaxpr(functools.partial(alone_with_slopes, segments=None, implementation="cudnn"))(arrays)
    backward = [e for e in made.eqns if "SoftmaxBackward" in str(e.params.get("target_name"))]
    assert [len(equation.outvars) for equation in backward] == [4]  # of query, key and value; and the workspace


@pytest.mark.parametrize(("size", "dtype"), [(4, "float32"), pytest.param(8, "bfloat16", marks=pytest.mark.slow)])
def test_both_rings_give_the_same_bits(size: int, dtype: str) -> None:
    arrays, segments = arguments(packed=True, dtype=dtype)
    scanned, ring = (attention(exchange, size, segments)(*arrays) for exchange in ("scanned-ring", "ring"))
    jax.tree.map(np.testing.assert_array_equal, scanned, ring)


def test_a_scanned_ring_is_a_program_that_does_not_grow() -> None:
    arrays, segments = arguments(packed=True)

    def lines(exchange: Exchange, size: int) -> int:
        return attention(exchange, size, segments).lower(*arrays).as_text().count("\n")

    assert lines("scanned-ring", 8) <= lines("scanned-ring", 4) < 0.6 * lines("ring", 8)


# ---- segments


@pytest.mark.slow
def test_a_row_of_two_documents_has_the_loss_of_both_alone() -> None:
    params = model.init_params(LLAMA, jax.random.key(0))
    tokens = np.random.default_rng(2).integers(0, LLAMA.vocab, (1, 17)).astype(np.int32)

    def loss(tokens: np.ndarray, segments: list[int] | None = None) -> float:
        rows = {"tokens": tokens} | ({} if segments is None else {"segments": np.array([segments], np.int32)})
        return float(jax.jit(objective_of(model, LLAMA, SINGLE_DEVICE))(params, rows)[0])

    first, second = loss(tokens[:, :6]), loss(tokens[:, 6:14])  # 5 and 7 targets
    numbers = [1] * 6 + [2] * 8 + [0] * 3
    assert loss(tokens, numbers) == pytest.approx((5 * first + 7 * second) / 12, rel=1e-5)
    assert loss(tokens, [0] * 17) == 0.0


# ---- train steps


@functools.cache
def train(
    config: DecoderConfig,
    sizes: tuple[tuple[str, int], ...] = (),
    strands: bool = False,
    context: Exchange = "ring",
    packed: bool = False,
    sharding: Sharding = "shard_map",
    schedule: str = "w",
) -> tuple[Any, list[dict[str, float]]]:
    """Parameters and metrics of five optimizer steps. All runs have the same batch."""
    axes: dict[str, Any] = {"dp": 1, "tp": 1} | dict(sizes)
    mesh = make_mesh(**axes)
    if "pp" in mesh.axis_names:
        training: Any = make_pipelined_step(config, mesh, OPTIMIZER, MICROBATCHES, schedule, context=context)
        step: Any = strand_interleave(training.train_step, microbatches=MICROBATCHES, pipeline=training.fold)
    else:
        training = make_train_step(config, mesh, OPTIMIZER, MICROBATCHES, sharding, context)
        step = strand_interleave(training.train_step, strict=True) if strands else jax.jit(training.train_step)
    shape = (4 * MICROBATCHES, config.seq + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, config.vocab, shape).astype(np.int32)}
    batch |= {"segments": documents(*shape)} if packed else {}
    placed = jax.device_put(batch, training.batch_sharding)
    state, found = training.init(jax.random.key(0)), []
    for _ in range(5):
        state, metrics = step(state, placed)
        found.append({name: float(value) for name, value in metrics.items()})
    return jax.device_get(training.to_model_order(state).params), found


def assert_equal(one: tuple[Any, list], other: tuple[Any, list]) -> None:
    for metrics, expected in zip(one[1], other[1], strict=True):
        names = [name for name in expected if name != "balance"]  # a mean over groups of tokens
        assert [metrics[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)
    for found, expected in zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=5e-5)


def case(config: DecoderConfig = LLAMA, packed: bool = False, **sizes: int) -> Any:
    name = "-".join(f"{axis}{size}" for axis, size in sizes.items()) + ("-packed" if packed else "")
    return pytest.param(config, packed, tuple(sizes.items()), id=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "packed", "sizes"),
    [
        case(cp=2),
        case(cp=8),
        case(packed=True, dp=2, cp=2),
        case(packed=True, cp=4, tp=2),
        case(config=EXPERTS, packed=True, ep=2, cp=2, tp=2),
    ],
)
def test_steps_train_as_one_device_does(config: DecoderConfig, packed: bool, sizes: Any) -> None:
    expected = train(config, packed=packed)
    assert expected[1][-1]["loss"] < expected[1][0]["loss"]
    assert_equal(train(config, sizes, strands=True, packed=packed), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sizes", "schedule"),
    [(LLAMA, {"pp": 2, "cp": 2}, "interleaved_si"), (EXPERTS, {"pp": 2, "ep": 2, "cp": 2}, "w")],
    ids=["llama", "experts"],
)
def test_pipelines_train_as_one_device_does(config: DecoderConfig, sizes: dict[str, int], schedule: str) -> None:
    config = dataclasses.replace(config, layers=4)
    found = train(config, tuple(sizes.items()), packed=True, schedule=schedule)
    assert_equal(found, train(config, packed=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "packed", "sizes"),
    [
        case(cp=8),
        case(config=EXPERTS, packed=True, ep=2, cp=4),
        case(config=dataclasses.replace(LLAMA, layers=4), pp=2, cp=4),
    ],
)
def test_scanned_rings_train_as_one_device_does(config: DecoderConfig, packed: bool, sizes: Any) -> None:
    assert_equal(
        train(config, sizes, strands=True, packed=packed, context="scanned-ring"), train(config, packed=packed)
    )


@pytest.mark.slow
def test_strands_of_a_scanned_ring_train_as_the_plain_step_does() -> None:
    strands, plain = (train(LLAMA, (("cp", 4),), strands, context="scanned-ring") for strands in (True, False))
    assert_equal(strands, plain)


@pytest.mark.slow
def test_all_gathers_and_fsdp_train_as_the_ring_does() -> None:
    sizes = (("dp", 2), ("cp", 4))
    expected = train(LLAMA, sizes)
    assert_equal(train(LLAMA, sizes, strands=True, context="all-gather"), expected)
    assert_equal(train(LLAMA, sizes, strands=True, sharding="fsdp"), expected)


# ---- errors


def make(sizes: dict[str, int], sharding: Sharding = "shard_map", context: Any = "ring") -> Any:
    axes: dict[str, Any] = {"dp": 1, "tp": 1} | sizes
    return make_train_step(LLAMA, make_mesh(**axes), OPTIMIZER, MICROBATCHES, sharding, context)


def check(**shapes: tuple[int, ...]) -> None:
    batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}
    make({"cp": 3}).check_batch(batch)


def test_batches_that_do_not_fit_are_one_error() -> None:
    with pytest.raises(ValueError, match="use a sequence length that is a multiple of 6"):
        check(tokens=(2, 17))
    with pytest.raises(ValueError, match=r"segments of shape \(2, 12\) do not fit tokens of shape \(2, 13\)"):
        check(tokens=(2, 13), segments=(2, 12))
    with pytest.raises(ValueError, match="a batch has no array 'segment'; it has 'tokens', and may have 'segments'"):
        check(tokens=(2, 13), segment=(2, 13))
    with pytest.raises(ValueError, match="the batch lacks 'tokens'"):
        check(segments=(2, 13))


def test_steps_that_do_not_fit_are_one_error() -> None:
    with pytest.raises(ValueError, match="sharding='auto' is not supported for context parallelism"):
        make({"cp": 2}, "auto")
    with pytest.raises(ValueError, match="context='zigzag' is unknown; use 'ring', 'scanned-ring' or 'all-gather'"):
        make({"cp": 2}, context="zigzag")
    with pytest.raises(ValueError, match="cp is 0; give a number of at least 1"):
        make({"cp": 0})
    with pytest.raises(ValueError, match="a mesh of dp 1 x cp 16 x tp 1 needs 16 devices, but there are 8"):
        make({"cp": 16})
    with pytest.raises(ValueError, match="sharding='auto' is not supported for experts; use 'shard_map'$"):
        make_pipelined_step(EXPERTS, make_mesh(1, 1, pp=2, ep=2), OPTIMIZER, MICROBATCHES, sharding="auto")
