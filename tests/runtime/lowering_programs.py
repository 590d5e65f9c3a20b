"""Small programs like train steps, one for each property that a round trip through HLO must keep.

Each entry of PROGRAMS makes (jitted function, arguments) on 8 devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Program = tuple[Any, tuple[Any, ...]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def mesh(axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(axis_type, axis_type))


def array(*shape: int, dtype: Any = jnp.float32, sharding: NamedSharding | None = None) -> jax.Array:
    values = np.random.RandomState(len(shape)).standard_normal(shape) / shape[-1] ** 0.5
    return jax.device_put(jnp.asarray(values, dtype), sharding)


def accumulate(loss: Callable[..., jax.Array], w: jax.Array, batches: jax.Array) -> Any:
    """Losses and gradients of `loss(w, batch)` summed by a scan over the leading axis of `batches`."""

    def body(carry: Any, batch: jax.Array) -> tuple[Any, None]:
        value, grad = jax.value_and_grad(loss)(w, batch)
        return (carry[0] + value, carry[1] + grad), None

    carry = (jnp.float32(0), jnp.zeros(w.shape, jnp.float32))
    return jax.lax.scan(body, carry, batches)[0]


@program
def manual_step() -> Program:
    """shard_map outside, scan over micro-batches and layers inside, collectives over both axes."""
    m = mesh()

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ jax.lax.all_gather(w, "tp", axis=1, tiled=True)), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = accumulate(loss, w, x)
        return jax.lax.pmean(value, ("dp", "tp")), w - jax.lax.psum(grad, "dp")

    specs = (P(None, None, "tp"), P(None, "dp"))
    sharded = jax.shard_map(step, mesh=m, in_specs=specs, out_specs=(P(), specs[0]), check_vma=False)
    w = array(3, 16, 16, sharding=NamedSharding(m, specs[0]))
    return jax.jit(sharded, donate_argnums=0), (w, array(4, 8, 16, sharding=NamedSharding(m, specs[1])))


@program
def automatic_step() -> Program:
    """in_shardings, out_shardings, a constraint inside the loop, donation."""
    m = mesh()
    weights, batch = NamedSharding(m, P(None, "tp")), NamedSharding(m, P(None, "dp"))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(m, P("dp", None)))
        return jnp.mean(jnp.tanh(y) ** 2)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = accumulate(loss, w, x)
        return value, w - grad

    jitted = jax.jit(
        step, in_shardings=(weights, batch), out_shardings=(NamedSharding(m, P()), weights), donate_argnums=0
    )
    return jitted, (array(16, 16), array(4, 8, 16))


@program
def unspecified_shardings() -> Program:
    """The arguments have shardings; XLA chooses those of the results."""
    m = mesh()

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = accumulate(lambda w, x: jnp.mean(jnp.sin(x @ w)), w, x)
        return value, w - grad

    w = array(16, 16, sharding=NamedSharding(m, P("tp", None)))
    return jax.jit(step, donate_argnames="w"), (w, array(4, 8, 16, sharding=NamedSharding(m, P(None, "dp"))))


@program
def nested_manual() -> Program:
    """shard_map inside the micro-batch loop, over all axes and over one of them."""
    m = mesh()

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        full = jax.shard_map(
            lambda x, w: jnp.tanh(jax.lax.psum(x @ w, "tp")),
            mesh=m, in_specs=(P("dp", "tp"), P("tp", None)), out_specs=P("dp", None),
        )  # fmt: skip
        partial = jax.shard_map(
            lambda x, w: (jax.lax.psum(x @ w, "tp"), jnp.float32(1)),
            mesh=m, in_specs=(P(None, "tp"), P("tp", None)), out_specs=(P(), P()), axis_names={"tp"},
        )  # fmt: skip
        y, one = partial(full(x, w), w)
        return jnp.mean(y**2) * one

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = accumulate(loss, w, x)
        return value, w - grad

    w = array(16, 16, sharding=NamedSharding(m, P("tp", None)))
    return jax.jit(step), (w, array(4, 8, 16, sharding=NamedSharding(m, P(None, "dp"))))


@program
def explicit_axes() -> Program:
    """Sharding in types."""
    m = mesh(AxisType.Explicit)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            y = jnp.einsum("bi,ij->bj", x, w, out_sharding=NamedSharding(m, P("dp", "tp")))
            return jnp.mean(jax.sharding.reshard(jnp.tanh(y), NamedSharding(m, P("dp", None))) ** 2)

        def body(i: int, carry: Any) -> Any:
            value, grad = jax.value_and_grad(loss)(w, x[i])
            return carry[0] + value, carry[1] + grad

        value, grad = jax.lax.fori_loop(0, 4, body, (jnp.float32(0), jnp.zeros_like(w)))
        return value, w - grad

    w = array(16, 16, sharding=NamedSharding(m, P(None, "tp")))
    return jax.jit(step, donate_argnums=0), (w, array(4, 8, 16, sharding=NamedSharding(m, P(None, "dp"))))


@program
def host_callbacks() -> Program:
    """A pure callback whose value is used, and an unordered print."""

    def step(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            y = jax.pure_callback(np.tanh, shape, x, vmap_method="sequential")
            jax.debug.print("mean {}", y.mean())
            return y * 2, None

        return jax.lax.scan(body, x, None, length=2)[0]

    return jax.jit(step), (array(4, 4),)


@program
def custom_derivatives() -> Program:
    """custom_vjp, remat with a policy, a jitted sub-function, lax.cond, dropout keys."""

    @jax.custom_vjp
    def scale(x: jax.Array) -> jax.Array:
        return x * 2

    scale.defvjp(lambda x: (scale(x), x), lambda x, g: (g * jnp.cos(x),))

    @jax.jit
    def block(x: jax.Array, key: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jax.lax.cond(x[0, 0] > 0, lambda x: scale(x), lambda x: x + 1, jnp.where(kept, x, 0))

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), 3)
        return jnp.mean(jax.checkpoint(lambda x: block(jax.lax.erf(x @ w), key), policy=policy)(x))

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return accumulate(loss, w, x)

    return jax.jit(step), (array(8, 8), array(3, 4, 8))


@program
def dropped_arguments() -> Program:
    """Arguments that the program does not read, which are dropped; keyword arguments, dictionaries, None."""

    def step(state: Any, unused: jax.Array, *, scale: jax.Array) -> Any:
        return {"w": state["w"] * scale, "none": state["none"]}, state["w"].sum()

    return jax.jit(step, donate_argnums=0), ({"w": array(8, 8), "none": None, "extra": array(2, 2)}, array(3))


@program
def dtypes_and_sorting() -> Program:
    """bfloat16, integers, sort, top_k, cumulative sums, convolution, a random bit generator."""

    def step(x: jax.Array, tokens: jax.Array) -> Any:
        values, indices = jax.lax.top_k(x.astype(jnp.float32), 3)
        noise = jax.random.normal(jax.random.key(7, impl="rbg"), x.shape, jnp.bfloat16)
        windows = jax.lax.conv_general_dilated(x[None], jnp.ones((3, 8, 8), x.dtype), (1,), "SAME",
                                               dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
        return values, indices, jnp.sort(x, axis=0), jnp.cumsum(x, axis=1), noise + x, windows, x[tokens]

    return jax.jit(step), (array(16, 8, dtype=jnp.bfloat16), jnp.arange(4, dtype=jnp.int32))


@program
def single_result() -> Program:
    """One result that is not in a tuple, on one device."""
    return jax.jit(lambda x: jnp.tanh(x) @ x), (array(8, 8),)


def keywords(name: str) -> dict[str, jax.Array]:
    return {"scale": jnp.float32(2)} if name == "dropped_arguments" else {}
