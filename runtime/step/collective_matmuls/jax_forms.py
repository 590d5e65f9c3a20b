"""Lowers the collective matmuls that a pass puts into a program.

    lowered = jax.jit(step).lower(...)
    passes = collective_matmul_passes(jax_compat.devices(lowered), "auto")     for a PassManager, before other passes

The pass `CollectiveMatmul` finds sites in HLO. A site is a collective with the matrix product next to it. This module
makes the program that replaces a site. A form is a way to compute a collective matmul, such as a ring. `JaxForms`
lowers a form of `runtime/collective_matmul` under a `shard_map`, over a mesh in which the site's device groups are one
axis:

    groups {0,2} {1,3} {4,6} {5,7}   ->   mesh (outside 2, axis 2, inside 2)   ->   HLO of one device

So the HLO has the device numbers of the surrounding program, and no device is renumbered. This holds for the
source-target pairs of a ring. It also holds for the peers that a Mosaic-GPU kernel (a custom call) computes.

Programs are cached for the life of the process, so equal layers share one program. It takes much longer to make a
program with a kernel than without one. Programs may be made during a compilation, because XLA calls the passes through
the PRE_SCHEDULER hook.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.passes.communication.collective_canonicalization import CollectiveCanonicalization
from dhelix.passes.communication.collective_matmul.collective_matmul import CollectiveMatmul
from dhelix.passes.communication.collective_matmul.pattern import Pattern, Placed
from dhelix.passes.communication.collective_matmul.splicing import prepare
from dhelix.passes.framework.manager import Pass, Stage, say_once
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.exclusive_kernels import ExclusiveKernels
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Times, choose
from dhelix.profiles.hardware import gpu_name
from dhelix.runtime.collective_matmul import execution, hybrid, mosaic, ring
from dhelix.runtime.collective_matmul.form_choice import Place, refusal, requested
from dhelix.runtime.collective_matmul.products import joined
from dhelix.runtime.compiler.lowering import hlo_bytes
from dhelix.runtime.processes.launch_settings import calls_outside_graphs, graphs_hold_calls, link_of
from dhelix.runtime.step.options import OFF

PAIRED = "co-executed, and its collective is predicted to cost less under the other strand's compute"
ALONE = "not co-executed, and its collective is predicted to cost less all the same"
_AXES = ("outside", "axis", "inside")
_BODY = "xla.sdy.manual_computation_body"


def collective_matmul_passes(
    devices: Sequence[Any],
    form: str | Form = "auto",
    stage: Stage = Stage.PRE_SCHEDULER,
    options: Mapping[str, Any] | None = None,
    paired: tuple[Placed, ...] = (),
) -> tuple[Pass, ...]:
    """Returns the passes that put collective matmuls into a program, in order.

    The result is empty for form "off" or a single device. Each of these passes must run before the other passes of its
    stage. At PRE_SCHEDULER, other passes change the collectives that `CollectiveMatmul` looks for. At POST_SCHEDULER,
    other passes order operators, and must respect the control dependencies that ExclusiveKernels adds. Every program
    whose Mosaic-GPU kernels wait for peers needs ExclusiveKernels, even if the user's own code calls the kernels.

    Args:
      devices: the devices that the program is lowered for, in the order of its partitions.
      form: "auto" for the fastest measured form on these devices, "off", or a form for all sites that can have it.
      stage: stage of the pass that replaces sites. LOWERED works on any backend, for collectives under shard_map.
      options: XLA options of the program in addition to XLA_FLAGS. They decide whether kernels are possible, because
        kernels need a program whose CUDA graphs contain no custom calls.
      paired: patterns and places of sites that keep their collectives
        (`runtime/step/collective_matmuls/weighing.py`).

    Raises:
      DhelixError: `form` is unknown.
    """
    if not isinstance(form, (str, Form)):
        raise DhelixError(f'{form!r} is not a form of collective matmuls: use "auto", "off", a name or key, or a Form')
    if isinstance(form, str) and form not in (OFF, "auto", "hybrid"):
        try:
            form = Form.parse(form)
        except DhelixError as error:
            raise DhelixError(f'collective_matmul={form!r}: use "auto", "off" or a form ({error})') from None
    if form == OFF or len(devices) < 2:
        return ()
    on_gpus = devices[0].platform in ("cuda", "gpu")
    times = times_on(devices[0].device_kind) if form == "auto" and on_gpus else None
    graphs = graphs_hold_calls(os.environ, options)
    if form == "auto":
        _say_what_stays(devices[0].device_kind, times, graphs)
    elif not on_gpus and stage is Stage.PRE_SCHEDULER:
        _say(f"on {devices[0].platform} collectives stay as they are: only on GPUs does a pass look for their places")
    matmuls = CollectiveMatmul(JaxForms(form, times, graphs, devices, paired), stage), ExclusiveKernels()
    return (CollectiveCanonicalization(), *matmuls) if stage is CollectiveCanonicalization.stage else matmuls


def _say_what_stays(kind: str, times: Times | None, graphs: bool) -> None:
    """Logs why no site of a program can have a form, or why none can have a kernel.

    The report gives the reasons for single sites.
    """
    if times is None:
        reason = (
            f"nothing was measured on {kind}, so collectives next to matrix products stay unchanged; run `dhelix "
            "profile`"
        )
    elif graphs:
        reason = (
            "no kernels, because the program's custom calls become part of CUDA graphs: jit it with "
            f"compiler_options={calls_outside_graphs(os.environ)}, or start with "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer="
        )
    else:
        return
    _say(reason)


def _say(reason: str) -> None:
    say_once(f"collective matmuls: {reason}", ("collective matmuls", reason))


def times_on(kind: str) -> Times | None:
    """Returns the measured times of forms on GPUs of this kind and over this process's link; None if there are none."""
    try:
        return collective_matmul_times.find(gpu_name(kind), link_of(os.environ))
    except DhelixError as error:  # a file that the user did not name must not stop a job
        say_once(f"no collective matmuls: {error}", ("collective matmul times",))
        return None


@dataclass(frozen=True)
class JaxForms:
    """Chooses forms and lowers them with JAX. Implements `Forms` of the pass (`collective_matmul.py` in `passes`).

    Attributes:
      form: "auto", or the form for all sites that can have it; "hybrid" leaves the number of chunks open.
      times: measured times, by which "auto" chooses forms. None: with "auto", all collectives stay.
      graphs: whether custom calls become part of CUDA graphs.
      devices: devices of the program, in the order of its partitions.
      paired: patterns and places of sites whose collectives stay, because they are predicted to cost less, for example
        under the other strand's compute.
      sources: digest of the source files that make the forms. It is part of the pass's fingerprint, because a compiled
        program depends on these files.
    """

    form: str | Form
    times: Times | None
    graphs: bool
    devices: InitVar[Sequence[Any]]
    paired: tuple[Placed, ...] = ()
    sources: str = field(init=False)

    def __post_init__(self, devices: Sequence[Any]) -> None:
        object.__setattr__(self, "sources", _sources())
        object.__setattr__(self, "_devices", tuple(devices))

    def choose(self, placed: Placed) -> Form:
        """Returns the form for sites with this pattern and place.

        Raises DhelixError if their collectives stay, or if the sites cannot have the requested form.
        """
        if placed in self.paired:
            raise DhelixError(PAIRED if placed.co_executed else ALONE)
        pattern = placed.pattern
        rows = pattern.site.rows // pattern.batch
        own = rows if pattern.site.kind == "matmul_all_reduce" else rows // pattern.site.axis_size
        place = Place(pattern.site, _AXES[1], own)
        with jax.sharding.use_abstract_mesh(self._mesh(pattern).abstract_mesh):
            if self.form == "auto":
                return choose(pattern.site, self.times, lambda form: refusal(form, place, self.graphs) is None)
            return requested(self.form, place, self.graphs) or MONOLITHIC

    def program(self, pattern: Pattern, form: Form) -> HloModule:
        """Returns the HLO of one device for a form. Raises DhelixError if JAX cannot lower the form."""
        try:
            return _program(self._mesh(pattern), pattern, form)
        except Exception as error:  # a form that does not lower must not end a compilation
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DhelixError(f"{pattern.site.key} as {form.key} does not lower: {reason}") from error

    def _mesh(self, pattern: Pattern) -> Mesh:
        devices: tuple[Any, ...] = self._devices  # pyright: ignore[reportAttributeAccessIssue]
        if len(devices) != math.prod(pattern.axis):
            raise DhelixError(f"collectives over {math.prod(pattern.axis)} devices in a program for {len(devices)}")
        types = (AxisType.Auto,) * len(_AXES)
        return Mesh(np.array(devices).reshape(pattern.axis), _AXES, axis_types=types)


@functools.cache
def _program(mesh: Mesh, pattern: Pattern, form: Form) -> HloModule:
    whole = NamedSharding(mesh, PartitionSpec())  # replicated: only the HLO of one device is used
    operands = [jax.ShapeDtypeStruct(s, pattern.site.dtype, sharding=whole) for s in operand_shapes(pattern)]
    function = _gathering if pattern.site.kind == "all_gather_matmul" else _reducing
    body = jax.shard_map(
        functools.partial(function, pattern, form),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    module = HloModule.from_bytes(hlo_bytes(jax.jit(body).lower(*operands)))
    bodies = [c for c in module.computations if c.name.startswith(_BODY)]
    if len(bodies) != 1:
        raise DhelixError(f"a shard_map has {len(bodies)} bodies in this version of JAX")
    module.entry = bodies[0]
    return prepare(module)


def _gathering(pattern: Pattern, form: Form, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    w = _side_by_side(weights, axis=0 if pattern.transposed else 1)
    (out,), gathered = execution.all_gather_matmul(form, x, (w,), _AXES[1], pattern.transposed)
    ends = list(itertools.accumulate(pattern.columns))
    products = [lax.slice_in_dim(out, end - n, end, axis=2) for n, end in zip(pattern.columns, ends, strict=True)]
    return [*products, gathered] if pattern.gathered else products


def _reducing(pattern: Pattern, form: Form, *operands: jax.Array) -> list[jax.Array]:
    """Computes a sum of products with its collective.

    The operands of the products are joined along the contraction, so the sum is one product.
    """
    xs, weights = operands[::2], operands[1::2]
    w, axis = _side_by_side(weights, axis=1 if pattern.transposed else 0), _AXES[1]
    if pattern.site.kind == "matmul_all_reduce":
        return [execution.matmul_all_reduce(form, joined(xs, axis=-1), w.T if pattern.transposed else w, axis)]
    match form.name:
        case "mosaic":
            x = joined(xs, axis=-1)
            return [mosaic.matmul_reduce_scatter(x, w, axis, form.tiles, pattern.transposed)]
        case "hybrid":
            return [hybrid.matmul_reduce_scatter(xs, w, axis, form.chunks, pattern.transposed)[0]]
    directions = ring.BIDIRECTIONAL if form.name == "bidirectional_ring" else ring.RING
    return [ring.matmul_reduce_scatter(xs, w, axis, directions, pattern.transposed)[0]]


def _side_by_side(weights: Sequence[jax.Array], axis: int) -> jax.Array:
    """Joins weights along an axis. Without the barrier, XLA would join them again for each use."""
    return weights[0] if len(weights) == 1 else lax.optimization_barrier(joined(weights, axis=axis))


def operand_shapes(pattern: Pattern) -> list[tuple[int, ...]]:
    """Returns the shapes of the operands on one device: x and w of each product, in turn.

    For an all-gather, the products share x, so the result is the shape of x once, then the shape of each w.
    """
    gathers = pattern.site.kind == "all_gather_matmul"
    rows = pattern.site.rows // pattern.batch // (pattern.site.axis_size if gathers else 1)
    shapes: list[tuple[int, ...]] = []
    for k in pattern.contractions:
        shapes.append((pattern.batch, rows, k))
        shapes += [(columns, k) if pattern.transposed else (k, columns) for columns in pattern.columns]
    return shapes


@functools.cache
def _sources() -> str:
    folder = Path(__file__).parents[1]
    files = [Path(__file__), *(folder / "collective_matmul").rglob("*.py")]
    digest = hashlib.sha256()
    for name in sorted(file.relative_to(folder).as_posix() for file in files):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
