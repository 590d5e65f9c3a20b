"""Makes kernel values opaque to the compiler, so that results are computed where they are used, not earlier.

    for step in steps:                  # a loop of 30 steps
        if step == 5:  store(f(held))   # LLVM computes f(held), g(held), ... before the loop, as `held` is the same in
        if step == 7:  store(g(held))   # all steps; then all of them wait in registers, which overflow

An assembler instruction that only copies a register, and that LLVM may not move, keeps f and g in their places.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def scalars[T: tuple](values: T) -> T:
    """Returns the same int32 scalars, opaque to LLVM."""
    zero = _zero()
    return type(values)(*(value + zero for value in values))


def part(array: jax.Array) -> jax.Array:
    """Returns the same array, opaque to LLVM. It holds 16-bit numbers in registers, in the layout of `wgmma`."""
    layout = plgpu.Layout.WGMMA
    kind = plgpu.ShapeDtypeStruct(array.shape, array.dtype, layout=layout)

    def same(_: Any, array: Any) -> Any:
        registers = array.registers.copy()
        for index, register in enumerate(array.registers.flat):
            value = utils.bitcast(register, ir.IntegerType.get_signless(32))
            registers.flat[index] = utils.bitcast(_moved(value, "mov.b32 $0, $1;", "=r,r"), register.type)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)

    return plgpu.inline_mgpu(arg_types=(layout,), return_type=kind)(same)(array)


def _zero() -> jax.Array:
    def zero(_: Any) -> Any:
        return mgpu.FragmentedArray.splat(_moved(None, "mov.b32 $0, 0;", "=r"), (), is_signed=True)

    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    return plgpu.inline_mgpu(return_type=kind)(zero)()


def _moved(value: Any, instruction: str, constraints: str) -> Any:
    operands = [] if value is None else [value]
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, operands, instruction, constraints, has_side_effects=True)
