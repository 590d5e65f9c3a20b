"""Partitioned HLO, which JAX does not lower to: taken from the GPU compiler, and executed on CPU devices.

    module = of_gpus(jax.jit(step).lower(...))            the module that passes get at PRE_SCHEDULER
    results = execute(module, arguments)                  the results of each device

The CPU compiler has no such stage. But CPUs execute one device's program as the body of a `shard_map` over all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dhelix.passes.analysis.dimension_factors import reshaped
from dhelix.passes.communication.collective_matmul.splicing import Splicer
from dhelix.passes.framework.fingerprint import module_name
from dhelix.passes.framework.manager import Stage
from dhelix.passes.hlo import Builder, Computation, HloModule, edit, shapes
from dhelix.runtime.compiler import deviceless, registration
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "s32": jnp.int32, "pred": jnp.bool_}


def of_gpus(lowered: jax.stages.Lowered) -> bytes:
    """The module that passes get at PRE_SCHEDULER. Without a GPU, the compilation may fail after that stage."""
    found: list[bytes] = []

    def take(stage: Stage, module: bytes) -> None:
        found.append(module)
        raise InterruptedError("the rest of the compilation is not needed")

    with registration.temporary_hook(take, module_name(hlo_bytes(lowered))):
        try:
            deviceless.compile(lowered)
        except jax.errors.JaxRuntimeError:
            if not found:
                raise
    return found[0]


def execute(module: HloModule, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Results of the entry, which must return a tuple, on each device.

    Args:
      module: the partitioned module; it is not changed.
      arguments: for each parameter, its values on all devices, [devices, ...].
    """
    devices = jax.devices("cpu")[: len(arguments[0])]
    results = [(1, *s.dimensions) for s in module.entry.root.shape.tuple_shapes]
    kinds = [_DTYPES[shapes.type_name(s)] for s in module.entry.root.shape.tuple_shapes]

    def body(*arguments: jax.Array) -> Any:  # only its signature matters; its computation is replaced
        used = sum(jnp.ravel(a)[0].astype(jnp.float32) for a in arguments)
        return [jnp.full(size, used, kind) for size, kind in zip(results, kinds, strict=True)]

    every = PartitionSpec("devices")
    mesh = Mesh(np.array(devices), ("devices",))
    program = jax.shard_map(body, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    lowered = jax.jit(program, keep_unused=True).lower(*arguments)
    whole = HloModule.from_bytes(hlo_bytes(lowered))
    (inside,) = [c for c in whole.computations if c.name.startswith("xla.sdy.manual_computation_body")]
    builder = Builder(inside)
    given = [
        reshaped(builder, parameter, wanted.shape.dimensions)
        for parameter, wanted in zip(inside.parameters, module.entry.parameters, strict=True)
    ]
    source = HloModule.from_bytes(module.to_bytes())
    for computation in source.computations:
        _fill(computation)
    made = Splicer(whole).import_entry(source, inside, given, "partitioned")
    inside.root = builder.tuple([reshaped(builder, r, size) for r, size in zip(made, results, strict=True)])
    edit.drop_dead(inside)
    return [np.asarray(r) for r in with_hlo(lowered, whole.to_bytes()).compile()(*arguments)]


def _fill(computation: Computation) -> None:
    """Replaces uninitialized buffers by zeros. On GPUs, stacks of residuals begin with them; CPUs have none."""
    builder = Builder(computation)
    for buffer in [i for i in computation.instructions if i.proto.custom_call_target == "AllocateBuffer"]:
        zero = builder.make("constant", shapes.scalar(buffer.shape.element_type))
        zero.proto.literal.shape.CopyFrom(zero.shape)
        zero.proto.literal.f32s.append(0.0)
        edit.replace_uses(computation, buffer, builder.make("broadcast", buffer.shape, [zero]))
    edit.drop_dead(computation)


def whole_numbers(module: HloModule, devices: int) -> list[np.ndarray]:
    """Small whole numbers for each parameter of the entry; parameters with a sharding are equal on all devices."""
    draw, found = np.random.default_rng(0), []
    for parameter in module.entry.parameters:
        values = draw.integers(-3, 4, (devices, *parameter.shape.dimensions))
        values[:] = values[:1] if parameter.proto.HasField("sharding") else values
        found.append(np.asarray(values, _DTYPES[shapes.type_name(parameter.shape)]))
    return found
