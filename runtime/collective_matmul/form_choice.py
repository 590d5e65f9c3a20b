"""Chooses the form of a collective matmul: the form that the user asks for, or the fastest form by measurement.

A site is a collective with its matmul, their sizes and their data type. The monolithic form runs the collective and
the matmul one after the other. The user passes one of these:

"auto"               The form that is fastest for the site, by measurements on such GPUs with such a link. Without
                     measurements, as on CPU, it is the monolithic form. If the fastest form is impossible here, the
                     next best form runs, and the log says so.
a name, or a Form    This form. If it is impossible, a DhelixError says what to do. The derivatives use this form, too,
                     if it is possible for them. Otherwise they use the monolithic form, and the log says so.
"""

import functools
import os
import re
from dataclasses import dataclass

import jax
from absl import logging

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import H200_SMS, MONOLITHIC, Form, Site, Times, choose
from dhelix.profiles.hardware import gpu_name
from dhelix.runtime.collective_matmul import mosaic
from dhelix.runtime.collective_matmul.monolithic import AxisName
from dhelix.runtime.processes import launch_settings
from dhelix.runtime.processes.launch_settings import link_of

_DTYPES = ("bfloat16", "float16", "float32", "float64")  # types for forms other than the monolithic one
_MOST_CHUNKS = 4  # the form "hybrid" without a number of chunks gets at most this many
_GPU = ("cuda", "gpu")
_HOPPER = re.compile(r"\bG?H\d{2,3}\b")  # H100, H200, H800, H20, GH200


@dataclass(frozen=True)
class Place:
    """A site in a program. It decides which forms are possible.

    Attributes:
      site: the kind, sizes and type of the collective matmul. They decide how long each form takes.
      axis_name: the mesh axis, or several mesh axes.
      rows: number of rows of one batch element on one device: of the operand `x` for an all-gather, of the result for
        the other kinds.
    """

    site: Site
    axis_name: AxisName
    rows: int


def requested(form: str | Form, place: Place, graphs: bool | None = None) -> Form | None:
    """Returns the form that the user asks for, or None for "auto".

    Args:
      form: "auto", the name of a form, its key (such as "hybrid:4"), or a `Form`.
      place: where the form is to run.
      graphs: see `refusal`.

    Raises:
      DhelixError: there is no such form, or the form is impossible at `place`.
    """
    if form == "auto":
        return None
    if not isinstance(form, (str, Form)):
        raise DhelixError(
            f'{place.site.kind}: form={form!r} is unknown: use "auto", the name or key of a form, or a Form'
        )
    wanted = _parsed(form, place) if isinstance(form, str) else form
    reason = refusal(wanted, place, graphs)
    if reason:
        raise DhelixError(f'{place.site.kind}: form "{wanted.key}" {reason}, or use form="auto"')
    return wanted


def resolve(wanted: Form | None, place: Place) -> Form:
    """Returns the form that runs at `place`. This form is always possible there.

    If `wanted` is possible, the form is `wanted`; otherwise it is the monolithic form. If `wanted` is None, the form is
    the fastest possible one.
    """
    if wanted is None and place.site.dtype not in _DTYPES:
        _log_once(f"{place.site.key}: {MONOLITHIC.key}, because no other form multiplies {place.site.dtype}")
        return MONOLITHIC
    if wanted is None:
        times = _times_here()
        wanted = choose(place.site, times)
        instead = choose(place.site, times, lambda form: refusal(form, place) is None)
    else:
        instead = MONOLITHIC
    reason = refusal(wanted, place)
    if reason is None:
        return wanted
    _log_once(f"{place.site.key}: {instead.key} instead of {wanted.key}, which {reason}")
    return instead


def refusal(form: Form, place: Place, graphs: bool | None = None) -> str | None:
    """Returns a text that says why `form` is impossible at `place`, and what to do. None if the form is possible.

    The text continues a sentence that begins with the form's name.

    Args:
      form: the form.
      place: where the form is to run.
      graphs: whether the program's custom calls become part of CUDA graphs. None: this process's settings decide.
    """
    if form.name == "monolithic":
        return None
    if place.site.dtype not in _DTYPES:
        return f"multiplies {', '.join(_DTYPES)}, not {place.site.dtype}: cast both operands"
    if not isinstance(place.axis_name, str):
        return f"works on one mesh axis, not on {place.axis_name}: give one axis"
    site, n = place.site, place.site.axis_size
    if form.name == "mosaic":
        reason = _no_kernels_here(form, graphs) or mosaic.refusal(site, form.tiles)
        return None if reason is None else f"has no kernel here ({reason}): use another form"
    if form.name == "hybrid" and (form.chunks < 2 or place.rows % form.chunks):
        return f"needs a number of chunks of at least 2 that divides {place.rows} rows: choose another"
    if form.name in ("ring", "bidirectional_ring"):
        if site.kind == "matmul_all_reduce" and place.rows % n:
            return f"scatters rows, but {place.rows} rows do not divide by {n} devices: pad them"
        rows = place.rows // n if site.kind == "matmul_all_reduce" else place.rows
        if form.name == "bidirectional_ring" and rows < 2:
            return f"needs at least 2 rows per device, not {rows}: use more rows"
    return None


def _no_kernels_here(form: Form, graphs: bool | None) -> str | None:
    """Returns why kernels that access their peers' memory cannot run on these devices; None if they can.

    Blocks of one device wait for blocks of other devices. So all blocks of a kernel must be resident at once, and each
    block needs a multiprocessor of its own.

    A CUDA graph keeps the addresses that a kernel was recorded with. XLA records the kernel again if the device's own
    buffers move, but not if a peer's buffers move. In the second case, the kernel reads other data at the old address
    (seen with jax 0.11.2).
    """
    platform, kind, there = _devices_here()
    if platform not in _GPU or not _HOPPER.search(kind):
        return f"it needs NVIDIA Hopper GPUs, but this is {kind}"
    wanted = (form.tiles and form.tiles.sms) or H200_SMS
    if there is not None and there < wanted:
        return f"it needs {wanted} multiprocessors, but this {kind} has {there}: give tiles with sms={there}"
    if link_of(os.environ) != "nvlink":
        return "it needs peer-to-peer access, but NCCL_P2P_DISABLE is set"
    if jax.process_count() > 1:
        return "it needs all GPUs of the axis in one process"
    if launch_settings.graphs_hold_calls(os.environ) if graphs is None else graphs:
        return "a CUDA graph would keep its peers' old addresses: start with XLA_FLAGS=--xla_gpu_enable_command_buffer="
    return None


def _parsed(text: str, place: Place) -> Form:
    if text != "hybrid":
        return Form.parse(text)
    divisors = [chunks for chunks in range(2, _MOST_CHUNKS + 1) if place.rows % chunks == 0]
    return Form("hybrid", chunks=max(divisors, default=1))


def _devices_here() -> tuple[str, str, int | None]:
    """Platform, kind and number of multiprocessors (None if unknown) of the current mesh's devices.

    The devices of an abstract mesh need not exist in this process. If the mesh names no device, the first of
    `jax.devices()` counts.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        default = jax.devices()[0]
        return default.platform, default.device_kind, getattr(default, "core_count", None)
    return device.platform, device.device_kind, device.num_cores


def _times_here() -> Times | None:
    platform, kind, _ = _devices_here()
    if platform not in _GPU:
        return None
    return collective_matmul_times.find(gpu_name(kind), link_of(os.environ))


@functools.cache
def _log_once(line: str) -> None:
    logging.warning("dhelix: %s", line)
