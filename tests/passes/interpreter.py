"""Runs lowered programs in StableHLO's reference interpreter: in milliseconds, with rounding after each operation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from dhelix.passes import jax_compat


def interpret(lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> list[np.ndarray]:
    """Results in the order of the output's leaves."""
    stablehlo.register_stablehlo_passes()
    module = jax_compat.stablehlo_module(lowered)
    with module.context, ir.Location.unknown():
        # HLO's converter makes `dot`, but the interpreter knows only `dot_general`.
        modern = "builtin.module(func.func(stablehlo-legalize-deprecated-ops{fail-on-unused=false}))"
        passmanager.PassManager.parse(modern).run(module.operation)
        leaves = [ir.DenseElementsAttr.get(np.asarray(x)) for x in jax.tree.leaves(arguments)]
        return [np.array(x) for x in stablehlo.eval_module(module, leaves)]
