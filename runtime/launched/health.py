"""Checks all processes of a job before its program uses devices.

    what                                        if it is wrong
    versions of dhelix, jax and jaxlib          all processes stop, with one message that names those that differ
    devices of each process, and their kind     the same
    all-gather over each mesh axis              a warning, if it has less than half of the profile's bandwidth

Process 0 shows a table on stderr. The check takes a few seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.runtime.launched import bandwidth
from dhelix.runtime.launched.bandwidth import Way
from dhelix.runtime.launched.task import Task
from dhelix.runtime.processes import agreement, description
from dhelix.runtime.processes.records import Entry
from dhelix.runtime.processes.stdout import to_stderr

_PURPOSE = "start the program"
_SLOW = 0.5  # of the profile's bandwidth


def check(mine: Task) -> None:
    """Runs the check. All processes of the job must call this.

    Raises:
      DhelixError: processes differ, or have other devices than the launcher gave them. Every process raises it.
    """
    hosts = agreement.gathered(_PURPOSE, socket.gethostname())
    mine.tell(hosts={str(number): host for number, host in enumerate(hosts)})
    versions = description.versions()
    agreement.check(_PURPOSE, _record(versions))
    agreement.together(_PURPOSE, lambda: _check_devices(mine), (DhelixError,))
    on_cpu = _local()[0].platform == "cpu"  # Gloo would print to the program's stdout, which may be JSON
    with to_stderr() if on_cpu else contextlib.nullcontext():
        found = [(way, bandwidth.measured(way), bandwidth.expected(way)) for way in _ways(mine)]
    if jax_compat.process_number() == 0:
        _show(hosts, versions, found)


def _record(versions: dict[str, str]) -> list[Entry]:
    local = _local()
    of_hosts = "Check the GPUs and the driver of that host, and what else runs on it"
    kind = Entry("kind of devices", local[0].device_kind, advice=of_hosts)
    number = Entry("number of devices of a process", str(len(local)), advice=of_hosts)
    words = "Install the same versions on every host"
    return [*(Entry(name, version, advice=words) for name, version in versions.items()), kind, number]


def _local() -> list[Any]:
    """This process's devices. `jax.local_devices` may be what the program has called; it refuses to call itself."""
    return [device for device in jax.devices() if device.process_index == jax_compat.process_number()]


def _check_devices(mine: Task) -> None:
    """Raises DhelixError if this process has fewer GPUs than the launcher gave it."""
    local, wanted = _local(), len(mine.local_device_ids)
    chosen = "cpu" in (jax.config.jax_platforms or "")
    if wanted and not chosen and (local[0].platform == "cpu" or len(local) != wanted):
        there = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise DhelixError(
            f"process {mine.process} ({socket.gethostname()}) has {len(local)} devices of kind {local[0].device_kind}, "
            f"but should have {wanted} of its host's GPUs ({','.join(map(str, mine.local_device_ids))}"
            + (f" of CUDA_VISIBLE_DEVICES={there}" if there is not None else "")
            + "); check JAX's CUDA plugin, the driver and the scheduler's flags there, or set JAX_PLATFORMS=cpu"
        )


def _ways(mine: Task) -> list[Way]:
    return bandwidth.ways(jax.devices(), mine.mesh) if jax.device_count() > 1 else []


def _show(hosts: list[str], versions: dict[str, str], found: list[tuple[Way, float, float | None]]) -> None:
    console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 100, highlight=False)
    names = [f"{name.removeprefix('version of ')} {text}" for name, text in versions.items() if "source" not in name]
    several = len(set(hosts))
    console.print(
        f"dhelix launch: {len(hosts)} processes on {several} host{'s' * (several > 1)} with {jax.device_count()} "
        f"devices ({jax.devices()[0].device_kind}); {', '.join(names)}",
        soft_wrap=True,
    )
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("all-gather over")
    for column in ("devices", "GB/s into each", "by the profile"):
        table.add_column(column, justify="right")
    for way, measured, expected in found:
        known = "no profile" if expected is None else _gigabytes(expected)
        table.add_row(way.name, str(way.size), _gigabytes(measured), known)
    console.print(table)
    for way, measured, expected in found:
        if expected is not None and measured < _SLOW * expected:
            console.print(
                f"dhelix launch: warning: {way.name} has {measured / expected:.0%} of the profile's bandwidth: look "
                "for a slow link or another job (nvidia-smi topo -m, NCCL_DEBUG=INFO)",
                soft_wrap=True,
            )
    sys.stderr.flush()


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.1f}" if rate >= 1e9 else f"{rate / 1e9:.2g}"  # CPUs may have less than 0.05
