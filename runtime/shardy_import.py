"""Shardy's operations, rebuilt in a StableHLO module that came back from HLO.

On the way from StableHLO to HLO, Shardy's dialect is written as custom calls and frontend attributes:

    %y = sdy.sharding_constraint %x <@mesh, [{"dp"}, {}]>
      -> y = custom-call(x), custom_call_target="Sharding", frontend_attributes={xla.sdy.sharding="..."}
    %y = sdy.manual_computation(%x) in_shardings=.. out_shardings=.. manual_axes=.. (%local) { body }   (a shard_map)
      -> a = custom-call(x), custom_call_target="xla.sdy.GlobalToLocalShape"
         b = call(a), to_apply=xla.sdy.manual_computation_body
         y = custom-call(b), custom_call_target="xla.sdy.LocalToGlobalShape"

XLA reads that form only from programs that are in it throughout; the arguments and results of a program that JAX
lowers are not. So `import_shardy` turns it back into the dialect, and the program is again as JAX would write it.

HLO passes may clone, move and rename these instructions, with three conditions: the three instructions of a
manual computation stay together as a chain; its callee keeps `manual_computation_body` in its name; and a
`LocalToGlobalShape` takes results of one call only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax.extend.mlir.dialects import sdy
from jax.interpreters.mlir import ir
from jaxlib.mlir import passmanager

from dhelix.passes.errors import DhelixError

FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
_BODY_NAME = "manual_computation_body"
_TO_LOCAL = "xla.sdy.GlobalToLocalShape"
_TO_GLOBAL = "xla.sdy.LocalToGlobalShape"
# Drops the loop bodies that the converter inlined but left behind; then xla.sdy.sharding and xla.sdy.meshes
# become sdy.sharding attributes and sdy.mesh operations.
_ATTRIBUTES_PIPELINE = "builtin.module(symbol-dce,xla-sdy-round-trip-import-shardy-attrs)"


class ShardyImportError(DhelixError):
    """The HLO form of a manual computation (shard_map) was taken apart, so it cannot be read back."""


def import_shardy(module: ir.Module) -> None:
    """Rebuild Shardy's operations in `module`, in place. The module's MLIR context must be entered."""
    passmanager.PassManager.parse(_ATTRIBUTES_PIPELINE).run(module.operation)
    for op in _collect(module, _is_sharding_constraint):
        _import_sharding_constraint(op)
    while calls := _collect(module, _is_manual_computation):
        for call in calls:
            _import_manual_computation(module, call)
        passmanager.PassManager.parse("builtin.module(symbol-dce)").run(module.operation)


def symbol_name(op: ir.Operation) -> str:
    """Name of a function or a mesh."""
    return ir.StringAttr(op.attributes["sym_name"]).value


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
    """Replace to-local, call and to-global by one sdy.manual_computation holding a copy of the callee."""
    to_local = _single((_producer(operand)[0] for operand in call.operands), call, _TO_LOCAL)
    to_global = _single((user for result in call.results for user in _users(result)), call, _TO_GLOBAL)
    if to_local is None and to_global is None:
        raise ShardyImportError(f"the manual computation at {_where(call)} has neither operands nor results")

    operands, in_shardings = [], []
    if to_local is not None:
        shardings = _sharding_list(to_local, "xla.sdy.in_shardings")
        for operand in call.operands:
            index = _producer(operand)[1]
            operands.append(to_local.operands[index])
            in_shardings.append(shardings[index])
    result_types, out_shardings, returned = [], [], []
    if to_global is not None:
        out_shardings = _sharding_list(to_global, "xla.sdy.out_shardings")
        returned = [ir.OpResult(value).result_number for value in to_global.operands]
        result_types = [value.type for value in _flat_results(to_global)]

    manual = sdy.ManualComputationOp(
        result_types,
        operands,
        sdy.TensorShardingPerValueAttr.get(in_shardings),
        sdy.TensorShardingPerValueAttr.get(out_shardings),
        _frontend_attribute(to_local or to_global, "xla.sdy.manual_axes"),
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    _move_body(module, call, manual, returned)
    if to_global is not None:
        for old, new in zip(_flat_results(to_global), manual.results, strict=True):
            old.replace_all_uses_with(new)
    for op in (to_global, call, to_local):
        _erase_with_elements(op)


def _move_body(module: ir.Module, call: ir.Operation, manual: sdy.ManualComputationOp, returned: list[int]) -> None:
    """Fill the region of `manual` with a copy of the called function that returns its results `returned`."""
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
    """The one custom call with this target among `ops`; None if `ops` is empty."""
    found: list[ir.Operation] = []
    for op in ops:
        if op is None or not _is_custom_call(op, target):
            raise ShardyImportError(f"a pass separated the shard_map at {_where(call)} from its {target}")
        if op not in found:
            found.append(op)
    if len(found) > 1:
        raise ShardyImportError(f"a pass gave the shard_map at {_where(call)} {len(found)} instructions {target}")
    return found[0] if found else None


def _producer(value: ir.Value) -> tuple[ir.Operation | None, int]:
    """Operation and result index behind `value`, seen through the element of a tuple."""
    if not isinstance(value.owner, ir.Operation | ir.OpView):
        return None, 0
    op = value.owner.operation
    if op.name == "stablehlo.get_tuple_element":
        return op.operands[0].owner.operation, ir.IntegerAttr(op.attributes["index"]).value
    return op, ir.OpResult(value).result_number


def _flat_results(op: ir.Operation) -> list[ir.Value]:
    """Results of `op`; for one tuple result its elements, each of which must be taken out at most once."""
    if len(op.results) != 1 or not isinstance(op.results[0].type, ir.TupleType):
        return list(op.results)
    elements: dict[int, ir.Value] = {}
    for user in _users(op.results[0]):
        elements[ir.IntegerAttr(user.attributes["index"]).value] = user.results[0]
    tuple_type = ir.TupleType(op.results[0].type)
    missing = [index for index in range(tuple_type.num_types) if index not in elements]
    for index in missing:
        element = ir.Operation.create(
            "stablehlo.get_tuple_element",
            results=[tuple_type.get_type(index)],
            operands=[op.results[0]],
            attributes={"index": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), index)},
            loc=op.location,
            ip=ir.InsertionPoint.after(op),
        )
        elements[index] = element.results[0]
    return [elements[index] for index in range(tuple_type.num_types)]


def _erase_with_elements(op: ir.Operation | None) -> None:
    if op is None:
        return
    for result in op.results:
        for user in _users(result):
            user.erase()
    op.erase()


def _sharding_list(op: ir.Operation, name: str) -> list[ir.Attribute]:
    return list(sdy.TensorShardingPerValueAttr(_frontend_attribute(op, name)).shardings)


def _frontend_attribute(op: ir.Operation, name: str) -> ir.Attribute:
    attributes = ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
    return ir.Attribute.parse(ir.StringAttr(attributes[name]).value)


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
