"""Recognizes the kernels of collective matmuls in a program by name. The name also says site and form.

    op_name   jit(step)/while/body/collective_matmul/all_gather_matmul bfloat16 8192x4096x3072 over 2/mosaic/...
                                   MARK              key of the site                                  key of the form

A site is a product with its collective: kind, type and sizes. A form is a way to run it (`collective_matmul/sites.py`).
To XLA, a Mosaic-GPU kernel is a custom call like any other. The pass that inserts the kernel knows its site and form,
and writes both into the name. XLA keeps the name, even if XLA fuses the kernel with the slices that the kernel reads.
Kernels that a user calls have no such names.
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
"""Part of the name stack of collective matmuls."""
FAMILY = "collective-matmul"
"""Start of the family in the keys of these kernels."""


def named(stack: str, site: Site, form: Form) -> str:
    """The name stack of the kernel that replaces a collective with the name stack `stack`."""
    return f"{stack}/{MARK}/{site.key}/{form.key}".lstrip("/")


def kernel_of(instruction: Instruction) -> tuple[Site, Form] | None:
    """Site and form of a kernel that waits for its peers. None for other instructions and unnamed kernels."""
    kernel = exclusive_kernel(instruction)
    parts = [] if kernel is None else kernel.op_name.split("/")
    for site, form in pairwise(parts):
        try:
            return Site.parse(site), Form.parse(form)
        except DhelixError:
            continue
    return None


def kernel_key(instruction: Instruction) -> OperatorKey | None:
    """The key of a kernel that waits for its peers. No profile has such a key. None for other instructions."""
    if exclusive_kernel(instruction) is None:
        return None
    found, work = kernel_of(instruction), work_of(instruction)
    family = "unknown" if found is None else ":".join([*found[0].key.split(), found[1].key])
    return OperatorKey("other", f"{FAMILY}:{family}", (), work.flops, work.bytes)
