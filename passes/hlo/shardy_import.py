"""Rebuilds Shardy's operations in a StableHLO module that was converted back from HLO.

The conversion from StableHLO to HLO writes Shardy's dialect as custom calls and frontend attributes:

    %y = sdy.sharding_constraint %x <@mesh, [{"dp"}, {}]>
      -> y = custom-call(x), custom_call_target="Sharding", frontend_attributes={xla.sdy.sharding="..."}
    %y = sdy.manual_computation(%x) in_shardings=.. out_shardings=.. manual_axes=.. { body }    (a shard_map)
      -> a = custom-call(x), custom_call_target="xla.sdy.GlobalToLocalShape"
         b = call(a), to_apply=xla.sdy.manual_computation_body
         y = custom-call(b), custom_call_target="xla.sdy.LocalToGlobalShape"

XLA reads this form only if the whole program uses it. In a program that JAX lowers, the arguments and results do not
use it. So `import_shardy` converts the form back into the dialect, as JAX would write the program.

HLO passes may clone, move and rename these instructions under three conditions:
- The three instructions of a manual computation stay together as a chain.
- The callee of a manual computation keeps `manual_computation_body` in its name.
- All operands of a `LocalToGlobalShape` are results of the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax.extend.mlir.dialects import sdy
from jax.interpreters.mlir import ir
from jaxlib.mlir import passmanager

from dhelix.errors import DhelixError

FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
_BODY_NAME = "manual_computation_body"
_TO_LOCAL = "xla.sdy.GlobalToLocalShape"
_TO_GLOBAL = "xla.sdy.LocalToGlobalShape"
# MLIR pass that drops functions that nothing calls. The converter inlines loop bodies but leaves their functions.
_DROP_UNUSED = "symbol-dce"
# MLIR pass that turns xla.sdy.sharding and xla.sdy.meshes into sdy.sharding attributes and sdy.mesh operations.
_IMPORT_ATTRIBUTES = "xla-sdy-round-trip-import-shardy-attrs"


class ShardyImportError(DhelixError):
    """A pass took apart the HLO form of a manual computation (shard_map), so it cannot be read back."""


def import_shardy(module: ir.Module) -> None:
    """Rebuilds Shardy's operations in `module`, in place. The caller must have entered the module's MLIR context.

    Raises ShardyImportError if a pass took apart the three instructions of a shard_map.
    """
    _run(module, _DROP_UNUSED)
    for op in _collect(module, lambda op: op.name == "stablehlo.custom_call"):
        _drop_empty_tilings(op)
        if _has_tuple_result(op):
            _split_tuple(op)
    if _speaks_shardy(module):
        _run(module, _IMPORT_ATTRIBUTES)
    for op in _collect(module, _is_sharding_constraint):
        _import_sharding_constraint(op)
    while calls := _collect(module, _is_manual_computation):
        for call in calls:
            _import_manual_computation(module, call)
        _run(module, _DROP_UNUSED)


def _speaks_shardy(module: ir.Module) -> bool:
    """Whether the module has attributes of Shardy.

    XLA's import pass must run only on such a module. It would remove all shardings of a program that was lowered for
    GSPMD.
    """

    def speaks(op: ir.Operation) -> bool:
        said = ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES]) if FRONTEND_ATTRIBUTES in op.attributes else ()
        return any(entry.name.startswith("xla.sdy.") for entry in said)

    return bool(_collect(module, speaks))


def symbol_name(op: ir.Operation) -> str:
    """The name of a function or a mesh."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def _run(module: ir.Module, mlir_pass: str) -> None:
    passmanager.PassManager.parse(f"builtin.module({mlir_pass})").run(module.operation)


def _drop_empty_tilings(op: ir.Operation) -> None:
    """Drops empty tilings, because compiler plugins read a version of StableHLO that has no tilings."""
    for name in ("operand_tilings", "result_tilings"):
        tilings = ir.ArrayAttr(op.attributes[name]) if name in op.attributes else []
        if tilings and not any(len(ir.ArrayAttr(tiling)) for tiling in tilings):
            del op.attributes[name]


def _has_tuple_result(op: ir.Operation) -> bool:
    return (
        len(op.results) == 1
        and isinstance(op.results[0].type, ir.TupleType)
        and all(user.name == "stablehlo.get_tuple_element" for user in _users(op.results[0]))
    )


def _split_tuple(op: ir.Operation) -> None:
    """Replaces a custom call with a tuple result (HLO's form) by a custom call with several results (StableHLO's form).

    Attributes with one entry per result (layouts, shardings, sharding rules) fit only StableHLO's form.
    """
    tuple_type = ir.TupleType(op.results[0].type)
    attributes = {op.attributes[i].name: op.attributes[i].attr for i in range(len(op.attributes))}
    attributes.pop("xla_shape", None)
    split = ir.Operation.create(
        op.name,
        results=[tuple_type.get_type(index) for index in range(tuple_type.num_types)],
        operands=list(op.operands),
        attributes=attributes,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    for user in _users(op.results[0]):
        index = ir.IntegerAttr(user.attributes["index"]).value
        user.results[0].replace_all_uses_with(split.results[index])
        user.erase()
    op.erase()


def _is_sharding_constraint(op: ir.Operation) -> bool:
    return _is_custom_call(op, "Sharding") and "sdy.sharding" in op.attributes


def _import_sharding_constraint(op: ir.Operation) -> None:
    per_value = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"])
    constraint = sdy.ShardingConstraintOp(
        op.operands[0], per_value.shardings[0], loc=op.location, ip=ir.InsertionPoint(op)
    )
    op.results[0].replace_all_uses_with(constraint.result)
    op.erase()


def _is_manual_computation(op: ir.Operation) -> bool:
    return op.name == "func.call" and _BODY_NAME in ir.FlatSymbolRefAttr(op.attributes["callee"]).value


def _import_manual_computation(module: ir.Module, call: ir.Operation) -> None:
    """Replaces the three instructions of a shard_map by one sdy.manual_computation with a copy of the callee."""
    to_local = _single((_producer(operand) for operand in call.operands), call, _TO_LOCAL)
    to_global = _single((user for result in call.results for user in _users(result)), call, _TO_GLOBAL)
    boundary = to_local or to_global
    if boundary is None:
        raise ShardyImportError(f"the manual computation at {_where(call)} has neither operands nor results")

    operands, in_shardings = [], []
    if to_local is not None:
        shardings = _sharding_list(to_local, "xla.sdy.in_shardings")
        for operand in call.operands:
            index = ir.OpResult(operand).result_number
            operands.append(to_local.operands[index])
            in_shardings.append(shardings[index])
    result_types, out_shardings, returned = [], [], []
    if to_global is not None:
        out_shardings = _sharding_list(to_global, "xla.sdy.out_shardings")
        returned = [ir.OpResult(value).result_number for value in to_global.operands]
        result_types = [value.type for value in to_global.results]

    manual = sdy.ManualComputationOp(
        result_types,
        operands,
        sdy.TensorShardingPerValueAttr.get(in_shardings),
        sdy.TensorShardingPerValueAttr.get(out_shardings),
        _frontend_attribute(boundary, "xla.sdy.manual_axes"),
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    _move_body(module, call, manual, returned)
    if to_global is not None:
        for old, new in zip(to_global.results, manual.results, strict=True):
            old.replace_all_uses_with(new)
    for op in (to_global, call, to_local):
        if op is not None:
            op.erase()


def _move_body(module: ir.Module, call: ir.Operation, manual: sdy.ManualComputationOp, returned: list[int]) -> None:
    """Fills the region of `manual` with a copy of the callee.

    Of the callee's results, the copy returns those whose numbers are in `returned`.
    """
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    function = next(op.operation for op in module.body.operations if _is_function(op.operation, name))
    copied = function.clone(ip=ir.InsertionPoint.at_block_begin(module.body))
    block = copied.regions[0].blocks[0]
    block.append_to(manual.operation.regions[0])
    terminator = block.operations[len(block.operations) - 1].operation
    values = [terminator.operands[index] for index in returned]
    sdy.ReturnOp(values, loc=terminator.location, ip=ir.InsertionPoint(terminator))
    terminator.erase()
    copied.erase()


def _single(ops: Iterator[ir.Operation | None], call: ir.Operation, target: str) -> ir.Operation | None:
    """The one custom call to `target` to which all elements of `ops` refer; None if `ops` is empty.

    Raises ShardyImportError if an element is another operation, or if there are several custom calls.
    """
    found: list[ir.Operation] = []
    for op in ops:
        if op is None or not _is_custom_call(op, target):
            raise ShardyImportError(f"a pass separated the shard_map at {_where(call)} from its {target}")
        if op not in found:
            found.append(op)
    if len(found) > 1:
        raise ShardyImportError(f"a pass gave the shard_map at {_where(call)} {len(found)} x {target}")
    return found[0] if found else None


def _sharding_list(op: ir.Operation, name: str) -> list[ir.Attribute]:
    return list(sdy.TensorShardingPerValueAttr(_frontend_attribute(op, name)).shardings)


def _frontend_attribute(op: ir.Operation, name: str) -> ir.Attribute:
    attributes = ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
    return ir.Attribute.parse(ir.StringAttr(attributes[name]).value)


def _producer(value: ir.Value) -> ir.Operation | None:
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _users(value: ir.Value) -> list[ir.Operation]:
    return [use.owner.operation for use in value.uses]


def _is_custom_call(op: ir.Operation, target: str) -> bool:
    name = op.attributes["call_target_name"] if op.name == "stablehlo.custom_call" else None
    return name is not None and ir.StringAttr(name).value == target


def _is_function(op: ir.Operation, name: str) -> bool:
    return op.name == "func.func" and symbol_name(op) == name


def _where(op: ir.Operation) -> str:
    return str(op.location).removeprefix("loc(").removesuffix(")")


def _collect(module: ir.Module, wanted: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if wanted(op):
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found
