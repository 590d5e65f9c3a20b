"""A plain train step for mixtures of experts, over a mesh of `dp` x `ep` x `tp` devices.

    mesh = make_mesh(dp=1, tp=2, ep=4)
    training = make_train_step(preset("phi-moe-demo"), mesh, optax.adamw(1e-3), microbatches=4)

Rows of the batch are split over `dp` and `ep`. Experts are split over `ep`. All other parameters are replicated over
both, and split over `tp` as in `models.common.train_step`. With FSDP, matrices, their gradients and their optimizer
state are also split over `dp`, and layers gather weights when they need them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dhelix.models.common.layers import resolve_attention
from dhelix.models.common.parallel import ManualParallel
from dhelix.models.common.train_step import Metrics, Sharding, Training, assemble, axes_of, check_mesh, over_dp
from dhelix.models.llama import model as llama
from dhelix.models.moe import model
from dhelix.models.moe.moe_config import MoeConfig
from dhelix.models.moe.wide_gradients import Wide, widen

DATA = ("dp", "ep")
"""The mesh axes that split the batch."""


def accumulate_gradients(
    config: MoeConfig, parallel: ManualParallel, microbatches: int, params: llama.Params, rows: jax.Array
) -> tuple[llama.Params, Metrics]:
    """Float32 mean gradients and mean metrics over the micro-batches of `rows [microbatches * batch, seq + 1]`."""
    params = llama.cast_params(config, params)
    # With stacked layers, wide gradients would double the stacks that the loop over layers fills. With FSDP, they would
    # double the volume of reduce-scatters.
    wide = params if config.scan_layers or parallel.split_over_dp else with_wide_experts(params)
    tokens = rows.reshape(-1, microbatches, rows.shape[1]).swapaxes(0, 1)

    def micro_batch(carry: tuple[llama.Params, Metrics], tokens: jax.Array):
        gradients, totals = carry
        take = jax.grad(model.loss, argnums=1, has_aux=True)
        new, metrics = take(config, wide, tokens[:, :-1], tokens[:, 1:], parallel)
        gradients = jax.tree.map(
            lambda accumulated, g: accumulated + g.astype(jnp.float32), gradients, gradients_of(new)
        )
        return (gradients, jax.tree.map(jnp.add, totals, metrics)), None

    zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), params)
    none = dict.fromkeys(("cross_entropy", *model.AUXILIARY), jnp.float32(0))
    (gradients, totals), _ = lax.scan(micro_batch, (zeros, none), tokens)
    return jax.tree.map(lambda value: value / microbatches, (gradients, totals))


def with_wide_experts(params: llama.Params) -> llama.Params:
    """`params` with a list of layers, whose experts' weights get their gradients in float32 (`wide_gradients`)."""

    def of(layer: dict[str, jax.Array]) -> dict[str, jax.Array | Wide]:
        return {name: widen(weight) if name in model.EXPERTS else weight for name, weight in layer.items()}

    return params | {"layers": [of(layer) for layer in params["layers"]]}


def gradients_of(derivatives: llama.Params) -> llama.Params:
    """The gradients of parameters, from the derivatives with respect to `with_wide_experts` of them."""

    def of(each: jax.Array | Wide) -> jax.Array:
        return each.gradient if isinstance(each, Wide) else each

    return jax.tree.map(of, derivatives, is_leaf=lambda each: isinstance(each, Wide))


def split_over_dp(config: MoeConfig, specs: llama.Params) -> tuple[tuple[str, int], ...]:
    """The names of the weights that `specs` splits over `dp`, each with the split dimension, not counting layers."""
    first = specs["layers"] if config.scan_layers else specs["layers"][0]
    layer = {name: spec[1:] if config.scan_layers else spec for name, spec in first.items()}
    every = layer | {name: spec for name, spec in specs.items() if name != "layers"}
    return tuple((name, tuple(spec).index("dp")) for name, spec in every.items() if "dp" in axes_of(spec))


def reduce_gradients(gradients: llama.Params, specs: llama.Params) -> llama.Params:
    """Turns each device's own gradients into those of the mean over `dp` and `ep`, under `shard_map`.

    An expert has seen the tokens of its whole `ep` group, so its gradients are sums over `ep` already. Gradients that
    are split over `dp` are sums over `dp` already. A parameter that is replicated over `tp` has seen only a part of the
    sequence on each device.
    """

    def reduce(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        split = axes_of(spec)
        summed = tuple(axis for axis in (*DATA, "tp") if axis not in split)
        devices = lax.axis_size("dp") * lax.axis_size("ep")
        return lax.psum(gradient, summed) / devices

    return jax.tree.map(reduce, gradients, specs)


def make_train_step(
    config: MoeConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    sharding: Sharding = "shard_map",
) -> Training:
    """A train step of `config` over `mesh` (axes `dp`, `ep` and `tp`), under `shard_map`. "fsdp" also splits over `dp`.

    Its metrics are `loss` (cross-entropy in nats per token plus the weighted routing losses), `grad_norm`,
    `cross_entropy`, and the means over layers, micro-batches and devices of `balance`, `z` and `dropped` (`Routing`).

    Raises:
      ValueError: `sharding` is "auto", the mesh has other axes, or the model does not divide over it.
    """
    if sharding not in ("shard_map", "fsdp"):
        raise ValueError(f"sharding={sharding!r} is not supported for experts; use 'shard_map' or 'fsdp'")
    check_mesh(config, mesh, microbatches, axes=(*DATA, "tp"))
    if config.experts % mesh.shape["ep"]:
        raise ValueError(
            f"experts = {config.experts} is not divisible by ep = {mesh.shape['ep']}; use an ep that divides it"
        )
    config = dataclasses.replace(config, attention=resolve_attention(config, mesh.devices.flat[0].platform))
    specs = model.param_specs(config)
    initial = functools.partial(model.init_params, config)
    if sharding == "fsdp" and mesh.shape["dp"] > 1:
        specs = over_dp(config, specs, jax.eval_shape(initial, jax.random.key(0)), mesh.shape["dp"])
    parallel = ManualParallel(experts="ep", split_over_dp=split_over_dp(config, specs))

    def local(params: llama.Params, rows: jax.Array) -> tuple[jax.Array, llama.Params, Metrics]:
        gradients, metrics = accumulate_gradients(config, parallel, microbatches, params, rows)
        metrics = lax.pmean(metrics, (*DATA, "tp"))
        loss = metrics["cross_entropy"] + config.balance_weight * metrics["balance"] + config.z_weight * metrics["z"]
        return loss, reduce_gradients(gradients, specs), metrics

    in_specs, out_specs = (specs, PartitionSpec(DATA)), (PartitionSpec(), specs, PartitionSpec())
    compute = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return assemble(config, mesh, microbatches, optimizer, compute, specs, initial, data=DATA)
