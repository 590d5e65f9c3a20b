"""Temporary memory of steps that replicate parameters over a mesh axis, compiled for H200s. No GPU is needed.

    python benchmarks/programs/replica_memory.py                      # a table of all meshes and loops
    python benchmarks/programs/replica_memory.py --meshes dp=4 --loops own
    python benchmarks/programs/replica_memory.py --meshes dp=4 --loops "value_and_grad, weighted"

The model is a transformer of four layers (width 4096, sequence 2048, vocabulary 8192, bfloat16, layers rematerialized,
SGD, four micro-batches), sharded by XLA's partitioner. Ring attention has its own shard_map in every layer, and
sequences of 8192. The decorator's step is compared with the same micro-batched step without passes. The exit status is
1 if a step needs more memory than the plain step plus the allowed slack, or if a pass refuses.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

_WORDS, _WIDTH, _HEADS, _HEAD, _HIDDEN, _LAYERS, _MICROBATCHES = 8192, 4096, 32, 128, 8192, 4, 4
MESHES = ("dp=4", "dp=2,tp=2", "dp=2,cp=2", "dp=8,tp=8", "fsdp=2,tp=2", "dp=2,fsdp=2")
RINGS = ("scanned ring", "unrolled ring")
LOOPS = ("value_and_grad", "own", "own, constrained")
LOSSES = ("weighted", "weight decay", "layers twice", "groups of layers")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--meshes", default=";".join((*MESHES, *RINGS)), help="separated by semicolons")
    made.add_argument("--loops", default=";".join(LOOPS), help="over micro-batches, separated by semicolons")
    arguments = made.parse_args()
    print("| mesh | loop | plain, GiB | ours, GiB | ratio | order |")
    print("|---|---|---|---|---|---|")
    from dhelix.passes.ordering.order_rules import MEMORY_SLACK

    failed = False
    meshes, loops = ([one.strip() for one in text.split(";")] for text in (arguments.meshes, arguments.loops))
    rows = [(mesh, loop) for mesh in meshes for loop in loops]
    if (meshes, loops) == ([*MESHES, *RINGS], list(LOOPS)):
        rows += [("dp=4", f"value_and_grad, {loss}") for loss in LOSSES]
    for mesh, loop in rows:
        plain, ours, order = compare(mesh, loop)
        failed |= ours > (1.0 + MEMORY_SLACK) * plain or order != "found"
        print(f"| {mesh} | {loop} | {plain:.2f} | {ours:.2f} | {ours / plain:.3f} | {order} |", flush=True)
    raise SystemExit(int(failed))


def compare(mesh: str, loop: str) -> tuple[float, float, str]:
    """GiB of temporaries of the plain step and of the decorator's step, and "found" or the passes that refused."""
    from dhelix.runtime.compiler import deviceless
    from dhelix.runtime.step.strand_interleave import strand_interleave

    step, arguments = program(mesh, loop)
    microbatches = _MICROBATCHES if loop.startswith("value_and_grad") else None
    reduce = "weighted" if "weighted" in loop else "mean"
    ours = strand_interleave(step, microbatches=microbatches, reduce=reduce, donate_argnums=0)
    found = []
    for mode in ("off", "on"):
        os.environ["DHELIX"] = mode
        stats = deviceless.compile(ours.lower(*arguments)).memory_analysis()
        assert stats is not None
        found.append(stats.temp_size_in_bytes / 2**30)
    refused = [entry.name for entry in ours.report(*arguments) if entry.outcome == "refused"]
    return found[0], found[1], f"refused by {', '.join(refused)}" if refused else "found"


def program(mesh: str, loop: str) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A train step and its abstract arguments: parameters and tokens."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from dhelix.runtime.compiler import deviceless
    from dhelix.runtime.step.microbatches.value_and_grad import value_and_grad

    ring = mesh in RINGS
    axes = {"cp": 4} if ring else {k: int(v) for k, _, v in (part.partition("=") for part in mesh.split(","))}
    length = 8192 if ring else 2048
    devices = deviceless.mesh(axes, "h200")
    tp, cp, fsdp = (name if name in axes else None for name in ("tp", "cp", "fsdp"))
    rows = tuple(name for name in ("dp", "fsdp") if name in axes) or None

    def placed(spec: P) -> NamedSharding:
        return NamedSharding(devices, spec)

    abstract = parameters(placed, tp, fsdp)

    if ring:
        split = {"in_specs": (P(None, None, "cp"),) * 3, "out_specs": P(None, None, "cp"), "check_vma": False}
        attention = jax.shard_map(ring_attention(mesh == "scanned ring", axes["cp"]), mesh=devices, **split)
    else:
        attention = causal_attention

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = jax.lax.with_sharding_constraint(x, placed(P(rows, cp)))
        q, k, v = jnp.einsum("bse,ethd->tbhsd", norm(x) * w["first"], w["qkv"])
        x = x + jnp.einsum("bhsd,hde->bse", attention(q, k, v), w["out"])
        return x + jax.nn.gelu((norm(x) * w["second"]) @ w["up"]) @ w["down"], None

    def layers(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(layer, x, w)[0], None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, w = params["embed"][tokens[:, :-1]], params["layers"]
        if "groups" in loop:
            grouped = jax.tree.map(lambda leaf: leaf.reshape(_LAYERS // 2, 2, *leaf.shape[1:]), w)
            x, _ = jax.lax.scan(jax.checkpoint(layers), x, grouped)
        else:
            x, _ = layers(layers(x, w)[0] if "twice" in loop else x, w)
        decay = 1e-4 * sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(w))
        scores = jax.nn.log_softmax(((norm(x) * params["last"]) @ params["head"]).astype(jnp.float32))
        entropy = -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))
        return entropy + decay if "decay" in loop else entropy

    weights_of_rows: dict[str, Any] = (
        {"weights": lambda params, tokens: jnp.sum(tokens > 0)} if "weighted" in loop else {}
    )

    def step(params: Any, tokens: jax.Array) -> Any:
        if loop.startswith("value_and_grad"):
            value, grads = value_and_grad(loss, **weights_of_rows)(params, tokens)
        else:
            shardings = jax.tree.map(lambda p: p.sharding, abstract) if "constrained" in loop else None
            value, grads = own_loop(loss, params, tokens.reshape(-1, _MICROBATCHES, length + 1), shardings)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads), value

    count = _MICROBATCHES * math.prod(axes[name] for name in rows or ())
    tokens = jax.ShapeDtypeStruct((count, length + 1), jnp.int32, sharding=placed(P(rows)))
    return step, (abstract, tokens)


def own_loop(loss: Any, params: Any, rows: jax.Array, shardings: Any) -> Any:
    """Loss and gradients summed over rows [micro-batch size, micro-batches, length]."""
    import jax
    import jax.numpy as jnp

    def one(total: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        if shardings is not None:
            grads = jax.lax.with_sharding_constraint(grads, shardings)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads), value

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    grads, values = jax.lax.scan(one, zeros, rows.swapaxes(0, 1))
    return values.mean(), grads


def parameters(placed: Callable[[Any], NamedSharding], tp: str | None, fsdp: str | None) -> Any:
    """The abstract parameters, in bfloat16. `tp` and `fsdp` name mesh axes, or are None."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    specs = {
        "embed": P(None, fsdp), "head": P(fsdp, tp), "last": P(),
        "layers": {
            "qkv": P(None, fsdp, None, tp), "out": P(None, tp, None, fsdp), "up": P(None, fsdp, tp),
            "down": P(None, tp, fsdp), "first": P(), "second": P(),
        },
    }  # fmt: skip
    sizes = {
        "embed": (_WORDS, _WIDTH), "head": (_WIDTH, _WORDS), "last": (_WIDTH,),
        "layers": {
            "qkv": (_LAYERS, _WIDTH, 3, _HEADS, _HEAD), "out": (_LAYERS, _HEADS, _HEAD, _WIDTH),
            "up": (_LAYERS, _WIDTH, _HIDDEN), "down": (_LAYERS, _HIDDEN, _WIDTH),
            "first": (_LAYERS, _WIDTH), "second": (_LAYERS, _WIDTH),
        },
    }  # fmt: skip

    def weights(spec: P, size: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=placed(spec))

    return jax.tree.map(weights, specs, sizes, is_leaf=lambda x: isinstance(x, P))


def norm(x: jax.Array) -> jax.Array:
    import jax
    import jax.numpy as jnp

    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; all arrays are [batch, heads, sequence, head dimension]."""
    import jax
    import jax.numpy as jnp

    length = q.shape[2]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) * _HEAD**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores).astype(q.dtype), v)


def ring_attention(scanned: bool, hops: int) -> Callable[..., jax.Array]:
    """Causal attention over a split sequence: keys and values go round a ring of `hops` devices."""
    import jax
    import jax.numpy as jnp

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        own, part = jax.lax.axis_index("cp"), q.shape[2]

        def one(carry: Any, hop: Any) -> Any:
            out, largest, total, k, v = carry
            theirs = (own - hop) % hops
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) * _HEAD**-0.5
            visible = (own * part + jnp.arange(part))[:, None] >= theirs * part + jnp.arange(part)
            scores = jnp.where(visible, scores, -1e9)
            new = jnp.maximum(largest, scores.max(-1))
            weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            added = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(q.dtype), v).astype(jnp.float32)
            k, v = (jax.lax.ppermute(x, "cp", [(i, (i + 1) % hops) for i in range(hops)]) for x in (k, v))
            return (out * scale[..., None] + added, new, total * scale + weights.sum(-1), k, v), None

        zero = jnp.zeros(q.shape[:3], jnp.float32)
        carry = (jnp.zeros(q.shape, jnp.float32), zero - 1e9, zero, k, v)
        if scanned:
            carry, _ = jax.lax.scan(one, carry, jnp.arange(hops))
        else:
            for hop in range(hops):
                carry, _ = one(carry, hop)
        return (carry[0] / carry[2][..., None]).astype(q.dtype)

    return attention


if __name__ == "__main__":
    from dhelix.runtime.compiler import deviceless

    deviceless.prepare_environment()
    import jax

    jax.config.update("jax_platforms", "cpu")
    main()
