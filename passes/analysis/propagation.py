"""Runs Shardy's propagation on a program before XLA partitions it, and returns the shardings of its values.

    dot(x, dy) of x: [{"dp"}, {}, {}] and dy: [{"dp"}, {}, {"tp"}], contracted over the first two dimensions

Here, each device computes one term of the result, which is a sum over the mesh axis "dp". The partitioner adds an
all-reduce that computes this sum. A program states the shardings of its arguments and of few other values. Propagation
finds the other shardings. XLA runs the same passes of the same jaxlib, so it usually finds the same shardings. XLA may
find different shardings in two cases: a later pass changes the program, or GSPMD propagates instead of Shardy. For
GSPMD, this module first translates the program's tiles to a mesh (`gspmd_shardings`). Use the result to decide whether
a change is likely to help. Never use it to prove that a change is legal.

Cost: one conversion of the module to StableHLO and one run of the propagation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.mlir import hlo_to_stablehlo
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jaxlib.mlir import passmanager

from dhelix.passes.analysis.gspmd_shardings import as_shardy
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.hlo.constraints import MESHES, Axes, Over, is_sharding_constraint, stated
from dhelix.passes.hlo.shardy_import import FRONTEND_ATTRIBUTES, import_shardy

_MARK = "dhelix.instruction"
_SHARDING = "sdy.sharding"


class Propagated:
    """The shardings of the values of a module.

    Attributes:
      mesh: name of the program's mesh. Empty if the program has no mesh or several meshes, or is lowered for GSPMD.
      axes: the mesh's axes and their sizes. For GSPMD, the axes are in the order of devices: the last axis changes
        fastest.
    """

    def __init__(
        self,
        mesh: str,
        axes: Mapping[str, int],
        found: Mapping[Instruction, list[list[Axes] | None]],
        said: Mapping[Instruction, list[Over]],
    ) -> None:
        self.mesh = mesh
        self.axes = dict(axes)
        self._found = found
        self._said = said

    def of(self, value: Instruction) -> list[Axes] | None:
        """The axes that split each dimension of an array; None if unknown."""
        return self._entry(value, 0)

    def of_operand(self, instruction: Instruction, number: int) -> list[Axes] | None:
        """The axes that split each dimension of operand `number`; None if unknown."""
        return self._entry(instruction, 1 + number)

    def said(self, constraint: Instruction) -> list[Over] | None:
        """The axes that a sharding constraint itself states for each dimension (`Over`); None if unknown."""
        return self._said.get(constraint)

    def _entry(self, instruction: Instruction, place: int) -> list[Axes] | None:
        entries = self._found.get(instruction, [])
        return entries[place] if place < len(entries) else None


UNKNOWN = Propagated("", {}, {}, {})


def propagate(module: HloModule) -> Propagated:
    """The shardings of the values of `module`; `UNKNOWN` for a program without a mesh or with several meshes.

    The module is not changed.

    Raises:
      PassRefusal: the program's tiles (GSPMD) fit no mesh.
    """
    marked = HloModule.from_bytes(module.to_bytes())
    own = dict(zip(_instructions(marked), _instructions(module), strict=True))
    tiled = MESHES not in marked.proto.frontend_attributes.map
    if tiled:
        as_shardy(marked)
    numbered = [i for i in own if i.opcode not in ("parameter", "tuple")]
    for number, instruction in enumerate(numbered):
        instruction.proto.frontend_attributes.map[_MARK] = str(number)
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        program = ir.Module.parse(hlo_to_stablehlo(marked.to_bytes()))
        import_shardy(program)
        meshes = [op.operation for op in program.body.operations if op.operation.name == "sdy.mesh"]
        meshes = [mesh for mesh in meshes if _axes(mesh)]  # JAX gives arguments of one device a mesh without axes
        if len(meshes) != 1:
            return UNKNOWN
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(program.operation)
        sizes = _axes(meshes[0])
        found = {own[numbered[number]]: entries for number, entries in _marked(program)}
        mesh = "" if tiled else ir.StringAttr(meshes[0].attributes["sym_name"]).value
        constraints = {i: stated(i) for i in numbered if is_sharding_constraint(i)}
        said = {own[i]: split.over for i, split in constraints.items() if split is not None}
        return Propagated(mesh, sizes, found, said)


def _axes(mesh: ir.Operation) -> dict[str, int]:
    axes = (sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(mesh.attributes["mesh"]).axes)
    return {axis.name: axis.size for axis in axes}


def _instructions(module: HloModule) -> Iterator[Instruction]:
    for computation in module.computations:
        yield from computation.instructions


def _marked(program: ir.Module) -> Iterator[tuple[int, list[list[Axes] | None]]]:
    """The number of each marked instruction, with the shardings of its first result and of its operands."""
    found: list[tuple[int, list[list[Axes] | None]]] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if FRONTEND_ATTRIBUTES in op.attributes:
            attributes = ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
            if _MARK in attributes and len(op.results):
                values = [op.results[0], *op.operands]
                found.append((int(ir.StringAttr(attributes[_MARK]).value), [_sharding(v) for v in values]))
        return ir.WalkResult.ADVANCE

    program.operation.walk(visit)
    yield from found


def _sharding(value: ir.Value) -> list[Axes] | None:
    """The axes that split each dimension of `value`; None if unknown. No axes split a value without a sharding."""
    if not isinstance(value.type, ir.RankedTensorType):
        return None
    unsplit: list[Axes] = [()] * ir.RankedTensorType(value.type).rank
    if isinstance(value.owner, ir.Block):
        argument = ir.BlockArgument(value)
        owner = argument.owner.owner
        if owner.operation.name == "func.func":
            if "arg_attrs" not in owner.attributes:
                return unsplit
            attributes = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[argument.arg_number])
            return _dimensions(attributes[_SHARDING]) if _SHARDING in attributes else unsplit
        place = argument.arg_number
        if owner.operation.name != "stablehlo.while":
            return None
    else:
        owner, place = value.owner, ir.OpResult(value).result_number
    if owner.operation.name in ("sdy.sharding_constraint", "sdy.reshard"):
        return _dimensions(owner.attributes["sharding"])
    if _SHARDING not in owner.attributes:
        return unsplit
    attribute: Any = owner.attributes[_SHARDING]
    return _dimensions(sdy.TensorShardingPerValueAttr(attribute).shardings[place])


def _dimensions(attribute: Any) -> list[Axes] | None:
    """The axes that split each dimension; None if only a part of an axis (a sub-axis) splits some dimension."""
    dimensions: list[Axes] = []
    for dimension in sdy.TensorShardingAttr(attribute).dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        dimensions.append(tuple(axis.name for axis in axes))
    return dimensions
