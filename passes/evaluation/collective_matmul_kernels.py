"""Kernels of collective matmuls in a program: which site and form one is, by the name that it was given.

    op_name   jit(step)/while/body/collective_matmul/all_gather_matmul bfloat16 8192x4096x3072 over 2/mosaic/...
                                   MARK              the site's key                                   the form's

A Mosaic-GPU kernel is a custom call like any other to XLA. What it computes, and so what it costs, is known where it is
spliced in, and its name is what XLA keeps, also where it fuses the kernel with the slices that it reads. Kernels that a
user calls have no such names.
"""

from __future__ import annotations

from itertools import pairwise

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import exclusive_kernel
from dhelix.passes.evaluation.operator_work import work_of
from dhelix.passes.hlo import Instruction
from dhelix.profiles.collective_matmul.sites import Form, Site
from dhelix.profiles.keys import OperatorKey

MARK = "collective_matmul"
"""In the name stack of what is a collective matmul already."""
FAMILY = "collective-matmul"
"""In the keys of such kernels."""


def named(stack: str, site: Site, form: Form) -> str:
    """The name stack of what takes the place of a collective whose name is `stack`."""
    return f"{stack}/{MARK}/{site.key}/{form.key}".lstrip("/")


def kernel_of(instruction: Instruction) -> tuple[Site, Form] | None:
    """The site and the form of a kernel that waits for its peers; None for what is none, or does not say."""
    kernel = exclusive_kernel(instruction)
    parts = [] if kernel is None else kernel.op_name.split("/")
    for site, form in pairwise(parts):
        try:
            return Site.parse(site), Form.parse(form)
        except DhelixError:
            continue
    return None


def kernel_key(instruction: Instruction) -> OperatorKey | None:
    """A key to count a kernel that waits for its peers by; nothing is measured under it. None for what is none."""
    if exclusive_kernel(instruction) is None:
        return None
    found, work = kernel_of(instruction), work_of(instruction)
    family = "unknown" if found is None else ":".join([*found[0].key.split(), found[1].key])
    return OperatorKey("other", f"{FAMILY}:{family}", (), work.flops, work.bytes)
