"""Reads, checks, edits and writes HLO modules as Python objects. Start at `module.py`."""

from dhelix.passes.hlo.builder import Builder
from dhelix.passes.hlo.loops import WhileLoop
from dhelix.passes.hlo.module import Computation, HloModule, Instruction
from dhelix.passes.hlo.schema import Shape
from dhelix.passes.hlo.verify import HloVerifyError, verify

__all__ = [
    "Builder",
    "Computation",
    "HloModule",
    "HloVerifyError",
    "Instruction",
    "Shape",
    "WhileLoop",
    "verify",
]
