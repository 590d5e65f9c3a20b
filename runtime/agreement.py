"""Hosts compare what they are about to run, before the first step.

Hosts that order collectives differently wait for each other for ever. So before the first step every process
gathers the fingerprints of all (of the inputs, and of the compiled order of collectives), and all stop with
one message if any differs. Nothing happens in a single process.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from dhelix.errors import HostsDisagreeError
from dhelix.passes import fingerprint
from dhelix.runtime.lowering import compiled_module

_HOST_BYTES = 64


def check_compiled(compiled: jax.stages.Compiled, marker: str) -> str | None:
    """Checks that all processes have the same program, in inputs and in compiled order of collectives.

    Every process must call it, the same number of times.

    Args:
      compiled: the step.
      marker: fingerprint of its inputs.

    Returns:
      The fingerprint of the collective order, or None in a single process, where it is not computed.

    Raises:
      HostsDisagreeError: in every process, naming those that differ.
    """
    if jax.process_count() == 1:
        return None
    order = compiled_fingerprint(compiled)
    check_agreement({"program, options, profile or versions": marker, "order of collectives": order})
    return order


def compiled_fingerprint(compiled: jax.stages.Compiled) -> str:
    """Fingerprint of the order in which a compiled program runs its collectives."""
    return fingerprint.collective_fingerprint(compiled_module(compiled))


def check_agreement(values: Mapping[str, str]) -> None:
    """Checks that `values` (what it is -> fingerprint) are the same in every process; the keys must be, too.

    Raises HostsDisagreeError in every process, naming those that differ.
    """
    if jax.process_count() == 1:
        return
    names = sorted(values)
    rows = [socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES)]
    rows += [fingerprint.of_bytes(values[name].encode()).encode() for name in names]
    gathered = multihost_utils.process_allgather(np.frombuffer(b"".join(rows), np.uint8))
    texts = [bytes(row).decode(errors="replace") for row in np.asarray(gathered)]
    hosts = [text[:_HOST_BYTES].rstrip() for text in texts]
    for index, name in enumerate(names):
        start = _HOST_BYTES + index * fingerprint.DIGITS
        found = [text[start : start + fingerprint.DIGITS] for text in texts]
        if len(set(found)) > 1:
            raise HostsDisagreeError(_message(name, found, hosts))


def largest(value: int) -> int:
    """The largest of all processes' values, each from 0. Every process must call it, the same number of times.

    For decisions that all must take alike: what a report or an executable says may differ between them.
    """
    if jax.process_count() == 1:
        return value
    gathered = multihost_utils.process_allgather(np.frombuffer(value.to_bytes(8, "big"), np.uint8))
    return max(int.from_bytes(bytes(row), "big") for row in np.asarray(gathered))


def _message(what: str, found: list[str], hosts: list[str]) -> str:
    groups: dict[str, list[str]] = {}
    for process, (digest, host) in enumerate(zip(found, hosts, strict=True)):
        groups.setdefault(digest, []).append(f"process {process} ({host})")
    listed = "; ".join(f"{digest} on {', '.join(members)}" for digest, members in groups.items())
    return (
        f"hosts disagree on the {what}: {listed}. They would wait for each other for ever. "
        "Start every process with the same source, options, plan and profile files, XLA_FLAGS and package versions"
    )
