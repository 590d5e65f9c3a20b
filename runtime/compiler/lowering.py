"""Reads the HLO of a `jax.stages.Lowered` and replaces its program with a changed one.

How `with_hlo` replaces the program:
1. jaxlib's converter turns the HLO into StableHLO, which is parsed into the MLIR context of the original module.
2. `dhelix.passes.hlo.shardy_import` rebuilds Shardy's operations, which HLO holds as custom calls.
3. Attributes are grafted: copied from the original module. The converter loses facts that belong to JAX rather than to
   the program. They are donation, shardings, memory kinds and layouts of arguments and results, and the number of
   partitions. These facts are attributes of the module and of its function `main`. Passes must keep the signature of
   `main`, so the attributes still fit.

docs/design/programs.md lists what a round trip from StableHLO to HLO and back keeps, and what it loses.
tests/runtime/compiler/test_lowering.py checks this list.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.extend.mlir import hlo_to_stablehlo
from jax.interpreters.mlir import ir

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.shardy_import import import_shardy, symbol_name


class LoweringError(DhelixError):
    """A changed HLO module cannot replace the lowered program."""


def hlo_bytes(lowered: jax.stages.Lowered) -> bytes:
    """The program of `lowered` as a serialized `HloModuleProto`, before any XLA pass."""
    return jax_compat.stablehlo_to_hlo(jax_compat.refined(lowered))


def module_name(lowered: jax.stages.Lowered) -> str:
    """The program's name, by which compiler hooks identify it. Unlike `hlo_bytes`, the function converts nothing."""
    return symbol_name(jax_compat.stablehlo_module(lowered).operation)


def compiled_module(compiled: jax.stages.Compiled) -> HloModule:
    """The scheduled program that XLA made. It is read from its proto, because HLO text does not always parse again.

    Raises DhelixError if the executable does not provide its HLO. This may happen, for example, if another runtime
    stored the executable in the compilation cache.
    """
    try:
        executable: Any = compiled.runtime_executable()
        return HloModule.from_bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    except (AttributeError, IndexError, TypeError, jax.errors.JaxRuntimeError) as error:
        raise DhelixError(
            f"the compiled step does not give its HLO ({error}); dump it with --xla_dump_to and inspect the dump"
        ) from None


def device_count(lowered: jax.stages.Lowered) -> int:
    """The number of devices that the program runs on."""
    attributes = jax_compat.stablehlo_module(lowered).operation.attributes
    names = ("mhlo.num_partitions", "mhlo.num_replicas")
    return math.prod(ir.IntegerAttr(attributes[name]).value for name in names if name in attributes)


def with_hlo(lowered: jax.stages.Lowered, new_bytes: bytes, module_name: str | None = None) -> jax.stages.Lowered:
    """Returns a copy of `lowered` with another program. `lowered` itself does not change.

    Args:
      lowered: result of `jax.jit(f).lower(...)`.
      new_bytes: the new program, as a serialized `HloModuleProto`. Its entry signature (types and order of parameters
        and results) must be the same. Sharding, donation, layout and memory kind of arguments and results always come
        from `lowered`; the module's own are ignored.
      module_name: new name of the module; None keeps the name. HLO passes see the name, and it is part of the key
        of JAX's persistent compilation cache.

    Raises:
      LoweringError: the bytes are not an HLO module, or the entry signature changed.
      ShardyImportError: a pass took apart the custom calls that represent a shard_map.
    """
    original = jax_compat.stablehlo_module(lowered)
    with original.context, ir.Location.unknown(original.context):
        # 1. HLO -> StableHLO.
        changed = _parse(new_bytes)
        # 2. Rebuild Shardy's operations.
        import_shardy(changed)
        # 3. Graft.
        _graft_attributes(original, changed)
        _graft_meshes(original, changed)
        if module_name is not None:
            changed.operation.attributes["sym_name"] = ir.StringAttr.get(module_name)
    return jax_compat.replace_stablehlo_module(lowered, changed, module_name)


def _parse(proto: bytes) -> ir.Module:
    """Converts a serialized `HloModuleProto` to StableHLO in the current MLIR context."""
    try:
        return ir.Module.parse(hlo_to_stablehlo(proto))
    except Exception as error:  # jaxlib raises several types for the same failure
        lines = str(error).strip().splitlines()
        reason = next((line for line in lines if line.startswith("error:")), (*lines, type(error).__name__)[0])
        raise LoweringError(f"the changed HLO cannot be turned back into StableHLO: {reason}") from error


def _graft_attributes(original: ir.Module, changed: ir.Module) -> None:
    """Copies the attributes of the module and of the arguments and results of `main` from `original`."""
    old, new = original.operation, changed.operation
    for name in _names(new.attributes):
        del new.attributes[name]
    for name in _names(old.attributes):
        new.attributes[name] = old.attributes[name]

    old_main, new_main = _main(original), _main(changed)
    old_type, new_type = old_main.attributes["function_type"], new_main.attributes["function_type"]
    if old_type != new_type:
        raise LoweringError(f"a pass changed the signature of the program: {old_type} became {new_type}")
    for name in ("arg_attrs", "res_attrs"):
        if name in new_main.attributes:
            del new_main.attributes[name]
        if name in old_main.attributes:
            new_main.attributes[name] = old_main.attributes[name]


def _graft_meshes(original: ir.Module, changed: ir.Module) -> None:
    """Replaces meshes in `changed` by the meshes of `original`, which have JAX's own attributes.

    Meshes that only `changed` has are kept.
    """
    old = {symbol_name(op): op for op in _meshes(original)}
    for op in _meshes(changed):
        if symbol_name(op) in old:
            op.erase()
    start = ir.InsertionPoint.at_block_begin(changed.body)
    for op in old.values():
        op.clone(ip=start)


def _meshes(module: ir.Module) -> list[ir.Operation]:
    return [op.operation for op in module.body.operations if op.operation.name == "sdy.mesh"]


def _main(module: ir.Module) -> ir.Operation:
    for op in module.body.operations:
        if op.operation.name == "func.func" and symbol_name(op.operation) == "main":
            return op.operation
    raise LoweringError("the module has no function called main")


def _names(attributes: Any) -> list[str]:
    return [attributes[index].name for index in range(len(attributes))]
