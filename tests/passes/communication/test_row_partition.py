"""Chains from a gather to a scatter, split by rows: results on CPU devices, and chains that stay whole."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes.communication.exchange import REPLACED
from dhelix.passes.communication.row_partition import RowPartition, pays
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule, shapes
from dhelix.profiles import keys
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.tests.machine import slowness

ALL = PartitionSpec(("dp", "tp"))
Body = Callable[[jax.Array, jax.Array, jax.Array], Any]


def lowered(body: Body, rows: int = 8, batch: int = 3) -> tuple[jax.stages.Lowered, list[jax.Array]]:
    """`body` of x [batch, rows, 4], w [4, 6] and v [6, 4] on each of 2 x 4 devices, and its arguments."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("dp", "tp"))
    draw = np.random.default_rng(0)

    def one(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        return jax.tree.map(lambda a: a[None], body(x[0], w[0], v[0]))

    sizes = (8, batch, rows, 4), (8, 4, 6), (8, 6, 4)
    given = [jax.device_put(draw.normal(size=s).astype(np.float32), NamedSharding(mesh, ALL)) for s in sizes]
    mapped = jax.shard_map(one, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)
    return jax.jit(mapped).lower(*given), given


def gather(x: jax.Array, axis: int = 1) -> jax.Array:
    return jax.lax.all_gather(x, "tp", axis=axis, tiled=True)


def scatter(y: jax.Array, axis: int = 1) -> jax.Array:
    return jax.lax.psum_scatter(y, "tp", scatter_dimension=axis, tiled=True)


def check(body: Body, parts: int = 2, rows: int = 8, chains: int = 1) -> HloModule:
    """Splits `body`, checks that it computes the same as before, and returns the new module."""
    whole, given = lowered(body, rows)
    module = HloModule.from_bytes(hlo_bytes(whole))
    context = PassContext(strict=True)
    assert RowPartition(parts=parts).run(module, context)
    assert context.notes[-1].facts["count"] == chains
    expected, actual = whole.compile()(*given), with_hlo(whole, module.to_bytes()).compile()(*given)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        scale = float(np.abs(other).max(initial=1))  # the tolerance covers sums in which large terms cancel
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-6, atol=2e-6 * scale)
    assert not RowPartition(parts=parts).run(module, PassContext(strict=True))  # parts are not cut again
    return module


def collectives(module: HloModule) -> list[tuple[str, list[int]]]:
    found = [i for c in module.computations for i in c.instructions if i.opcode in ("all-gather", "reduce-scatter")]
    return [(i.opcode, list(i.shape.dimensions)) for i in found]


def feed_forward(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = gather(x) @ w
    return scatter((h * jax.lax.logistic(h)) @ v)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_chain_is_computed_in_parts(parts: int) -> None:
    module = check(feed_forward, parts)
    expected = [("all-gather", [3, 32 // parts, 4])] * parts + [("reduce-scatter", [3, 8 // parts, 4])] * parts
    assert sorted(collectives(module)) == sorted(expected)
    instructions = [
        i for c in module.computations for i in c.instructions if i.opcode in ("all-gather", "reduce-scatter")
    ]
    channels = [i.proto.channel_id for i in instructions]
    keys = [i.proto.frontend_attributes.map["combiner_key"] for i in instructions]
    assert len(set(channels)) == len(channels) and len(set(keys)) == parts


def test_what_else_reads_whole_arrays_reads_the_parts_joined() -> None:
    """Such readers are the backward pass, or a product over rows."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        g = gather(x)
        h = g @ w
        return scatter(jnp.tanh(h) @ v), h, g, jnp.einsum("bsk,bsf->kf", g, h)

    check(body)


def test_rows_are_followed_where_they_go() -> None:
    """Reshapes may join rows with other dimensions; transposes, reductions and broadcasts may move other dimensions."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h = (gather(x).reshape(96, 4) @ w).reshape(3, 32, 2, 3)
        h = h / (1.0 + jnp.sum(h * h, axis=(2, 3), keepdims=True))
        h = jnp.concatenate([h[..., None], 2.0 * h[..., None]], -1).transpose(2, 3, 1, 4, 0).sum(3)  # [2, 3, 32, 3]
        return scatter(jnp.einsum("pqsb,pqk->bsk", h, v.reshape(2, 3, 4)))

    check(body)


def test_other_arrays_with_rows_are_cut() -> None:
    """A residual, a bias for each row, and the result of another gather."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        saved = jnp.sin(jnp.arange(3 * 32 * 6, dtype=jnp.float32)).reshape(3, 32, 6)
        h = gather(x) @ w
        h = jnp.where(saved > 0.0, h, saved) + jnp.arange(32, dtype=jnp.float32)[None, :, None] + gather(x * 2.0) @ w
        return scatter(h @ v)

    check(body)


def test_chains_one_behind_the_other() -> None:
    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return feed_forward(x + feed_forward(x, w, v), w, v)

    assert len(collectives(check(body, chains=2))) == 8


def test_rows_before_the_batch() -> None:
    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return scatter(jnp.tanh(gather(x.transpose(1, 0, 2), 0) @ w) @ v, 0)

    check(body)


STEPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "add": lambda h: h + 1.5,
    "rows": lambda h: h * jnp.cos(jnp.arange(h.size, dtype=jnp.float32)).reshape(h.shape),
    "norm": lambda h: h / jnp.sqrt(1.0 + jnp.mean(h * h, -1, keepdims=True)),
    "halves": lambda h: jnp.concatenate([h, -h], -1).reshape(*h.shape, 2).sum(-1),
    "turn": lambda h: jnp.tanh(h.transpose(2, 1, 0)).transpose(2, 1, 0),
    "flat": lambda h: jnp.abs(h.reshape(-1, h.shape[-1])).reshape(h.shape),
    "product": lambda h: h @ jnp.eye(h.shape[-1], k=1, dtype=jnp.float32),
}


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(
    strategies.lists(strategies.sampled_from(sorted(STEPS)), max_size=6),
    strategies.lists(strategies.sampled_from(sorted(STEPS)), max_size=3),
    strategies.sampled_from([(2, 4), (2, 8), (3, 6)]),
)
def test_any_steps_of_rows(before: list[str], behind: list[str], sizes: tuple[int, int]) -> None:
    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        h = gather(x)
        for name in before:
            h = STEPS[name](h)
        kept = h = h @ w
        for name in behind:
            h = STEPS[name](h)
        return scatter(h @ v), kept

    check(body, *sizes)


def over_rows(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = gather(x) @ w
    return scatter((h - h.max(1, keepdims=True)) @ v)


def between_rows(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = gather(x) @ w
    return scatter(jnp.einsum("bst,btf->bsf", jnp.einsum("bsf,btf->bst", h, h), h) @ v)


def other_devices(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = jax.lax.all_gather(x, "dp", axis=1, tiled=True) @ w
    return scatter(h @ v)


def other_dimension(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return scatter(gather(x, 1) @ w @ v, 2)


def a_collective_between(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return scatter(jax.lax.psum(gather(x) @ w, "dp") @ v)


def a_collective_beside(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = gather(x) @ w
    return scatter((h + jax.lax.psum(h, "dp")) @ v)


@pytest.mark.parametrize(
    ("body", "rows", "reason"),
    [
        (feed_forward, 7, "the rows do not divide into 2 parts"),
        (over_rows, 8, "a reduce in the chain mixes rows"),
        (between_rows, 8, "a dot in the chain mixes rows"),
        (other_devices, 8, "the all-gather and the reduce-scatter run over different devices"),
        (other_dimension, 8, "the reduce-scatter does not scatter the rows"),
        (a_collective_between, 8, "no all-gather leads to the reduce-scatter without another collective in between"),
        (a_collective_beside, 8, "another collective is in the chain"),
        (lambda x, w, v: scatter(gather(x)), 8, "no product is in the chain"),
        (
            lambda x, w, v: scatter(jnp.tile(x, (1, 4, 1)) @ w @ v),
            8,
            "no all-gather leads to the reduce-scatter without another collective in between",
        ),
    ],
)
def test_what_cannot_be_cut_is_left(body: Body, rows: int, reason: str) -> None:
    module = HloModule.from_bytes(hlo_bytes(lowered(body, rows)[0]))
    before, context = module.to_bytes(), PassContext(strict=True)
    assert not RowPartition().run(module, context)
    assert [note.message for note in context.notes] == [f"left alone: {reason}"]
    assert module.to_bytes() == before


LAYER = """
HloModule m, num_partitions=4
add { a = bf16[] parameter(0) b = bf16[] parameter(1) ROOT s = bf16[] add(a, b) }
ENTRY e {
  x = bf16[2048,4096] parameter(0)
  w = bf16[4096,FFN] parameter(1)
  v = bf16[FFN,4096] parameter(2)
  g = bf16[8192,4096] all-gather(x), channel_id=1, use_global_device_ids=true, replica_groups={{0,1,2,3}},
    dimensions={0}
  a = bf16[8192,FFN] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="strand_alpha/a"}
  b = bf16[8192,FFN] tanh(a)
  y = bf16[8192,4096] dot(b, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="STRAND/b"}
  ROOT r = bf16[2048,4096] reduce-scatter(y), channel_id=2, use_global_device_ids=true, replica_groups={{0,1,2,3}},
    dimensions={0}, to_apply=add
}
"""


@pytest.mark.parametrize(
    ("link", "setting", "ffn", "strand", "reason"),
    [
        ("no-p2p", "small-buffers", 3584, "strand_alpha", ""),
        ("no-p2p", "small-buffers", 3584, "strand_beta", "the other strand hides the collectives"),
        ("nvlink", "default", 3584, "strand_alpha", "products take longer than communication"),
        ("no-p2p", "small-buffers", 64, "strand_alpha", "parts are not faster"),
    ],
)
def test_costs_and_strands_decide(link: str, setting: str, ffn: int, strand: str, reason: str) -> None:
    """The parts of a collective take longer than the whole. The difference must be less than what the parts hide."""
    text = LAYER.replace("FFN", str(ffn)).replace("STRAND", strand)
    model, context = CostModel.find("H200", link, setting), PassContext(strict=True)
    assert pays(HloModule.from_text(text), model) == (not reason)
    assert RowPartition(model).run(HloModule.from_text(text), context) == (not reason)
    assert not reason or context.notes[0].message == f"left alone: {reason}"


def test_a_plan_names_the_chains_that_costs_have_chosen() -> None:
    """What the pass splits by costs is a fact of its report. With this fact, it splits the same without costs."""
    text, context = LAYER.replace("FFN", "3584"), PassContext(strict=True)
    by_costs, by_plan, none = (HloModule.from_text(text) for _ in range(3))
    assert RowPartition(CostModel.find("H200", "no-p2p", "small-buffers")).run(by_costs, context)
    (name,) = context.notes[-1].facts[REPLACED]
    key = keys.parse(name)
    assert isinstance(key, CollectiveKey) and (key.kind, key.bytes, key.group_size) == ("all-gather", 64 << 20, 4)
    assert RowPartition(only=(key,)).run(by_plan, PassContext())
    opcodes = [[i.opcode for i in module.entry.instructions] for module in (by_costs, by_plan)]
    assert opcodes[0] == opcodes[1] and opcodes[0].count("all-gather") == 2
    assert not RowPartition(only=(replace(key, bytes=1 << 20),)).run(none, PassContext())


def test_a_part_does_not_wait_for_the_next() -> None:
    """The barrier ties only part 1's compute to part 0's last product. Gather 1 itself does not wait for part 0."""
    module = HloModule.from_text(LAYER.replace("FFN", "3584"))
    assert RowPartition().run(module, PassContext(strict=True))
    (barrier,) = [i for i in module.entry.instructions if i.opcode == "opt-barrier"]
    assert [shapes.text(s) for s in barrier.shape.tuple_shapes] == ["bf16[4096,4096]"] * 2
    opcodes = [i.opcode for i in barrier.operands[0].operands]
    assert opcodes == ["all-gather", "dot"]


def test_without_costs_that_are_to_decide_all_stay_whole() -> None:
    context = PassContext(strict=True)
    assert not RowPartition(costs_decide=True).run(HloModule.from_text(LAYER.replace("FFN", "3584")), context)
    assert "no measured costs" in context.notes[0].message
    with pytest.raises(DhelixError, match="give 2 or more"):
        RowPartition(parts=1)


def test_empty_arrays_are_left() -> None:
    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h = (gather(x) @ w[:, :0])[None].reshape(3, 32, 0)
        return scatter(h @ v[:0])

    RowPartition().run(HloModule.from_bytes(hlo_bytes(lowered(body)[0])), PassContext(strict=True))


def test_many_layers_take_no_time() -> None:
    """Each scatter looks only at the gathers before it, up to the next collective."""
    layer = """
  g.N = f32[64,8] all-gather(x.N), channel_id=1, use_global_device_ids=true, replica_groups={{0,1,2,3}}, dimensions={0}
  a.N = f32[64,8] dot(g.N, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  b.N = f32[64,8] custom-call(a.N), custom_call_target="attention"
  r.N = f32[16,8] reduce-scatter(b.N), channel_id=2, use_global_device_ids=true, replica_groups={{0,1,2,3}},
    dimensions={0}, to_apply=add
  x.M = f32[16,8] add(x.N, r.N)"""
    layers = "".join(layer.replace(".N", f".{n}").replace(".M", f".{n + 1}") for n in range(400))
    text = f"""HloModule m, num_partitions=4
add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
ENTRY e {{ x.0 = f32[16,8] parameter(0) w = f32[8,8] parameter(1) {layers}
  ROOT y = f32[16,8] copy(x.400) }}"""
    module, context = HloModule.from_text(text), PassContext(strict=True)
    begun = time.process_time()
    assert not RowPartition().run(module, context)
    assert time.process_time() - begun < 2.0 * slowness()
    assert context.notes[0].facts["count"] == 400


def test_ordered_chains_and_scheduled_modules_are_left() -> None:
    behind = LAYER.replace("FFN", "3584").replace(
        "b = bf16", "n = bf16[] constant(1), control-predecessors={a}\n  b = bf16"
    )
    context = PassContext(strict=True)
    assert not RowPartition().run(HloModule.from_text(behind), context)
    assert context.notes[0].message == "left alone: it has control dependencies"
    ordered = LAYER.replace("FFN", "3584").replace("tanh(a)", "tanh(a), control-predecessors={w}")
    for text, reason in (
        (ordered, "left alone: it has control dependencies"),
        (
            ordered.replace("num_partitions=4", "num_partitions=4, is_scheduled=true"),
            "left alone: the module is scheduled",
        ),
    ):
        context = PassContext(strict=True)
        assert not RowPartition().run(HloModule.from_text(text), context)
        assert [note.message for note in context.notes] == [reason]


def test_equal_modules_are_equal_afterwards() -> None:
    before, made = HloModule.from_text(LAYER.replace("FFN", "3584")).to_bytes(), set()
    for _ in range(2):
        module = HloModule.from_bytes(before)
        assert RowPartition().run(module, PassContext(strict=True))
        made.add(module.to_bytes())
    assert len(made) == 1
