"""Hosts compare what they are about to run, before the first step, and tell each other what they measured.

Hosts that order collectives differently wait for each other for ever. So before the first step every process
gathers the fingerprints of all (of the inputs, and of the compiled order of collectives), and all stop with
one message if any differs. Nothing happens in a single process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from dhelix.errors import DhelixError, HostsDisagreeError
from dhelix.passes import fingerprint
from dhelix.runtime.lowering import compiled_module

_HOST_BYTES = 64
_SIZE_BYTES = 8


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
    gathered = multihost_utils.process_allgather(np.frombuffer(value.to_bytes(_SIZE_BYTES, "big"), np.uint8))
    return max(int.from_bytes(bytes(row), "big") for row in np.asarray(gathered))


def gathered(text: str) -> list[str]:
    """What each process says, in the processes' order. Every process must call it, the same number of times."""
    if jax.process_count() == 1:
        return [text]
    said = text.encode()
    sized = len(said).to_bytes(_SIZE_BYTES, "big") + said.ljust(largest(len(said)), b"\0")
    rows = [bytes(row) for row in np.asarray(multihost_utils.process_allgather(np.frombuffer(sized, np.uint8)))]
    sizes = [int.from_bytes(row[:_SIZE_BYTES], "big") for row in rows]
    return [row[_SIZE_BYTES : _SIZE_BYTES + size].decode() for row, size in zip(rows, sizes, strict=True)]


def together[T](make: Callable[[], T], errors: tuple[type[Exception], ...]) -> T:
    """What `make` returns, if it returns in all processes: where one failed, the others would wait for it for ever.

    Every process must call it, the same number of times; what `make` does must not wait for other processes.

    Args:
      errors: what `make` may raise; in a single process it is raised as it is.

    Raises:
      DhelixError: in every process, with what the first one said that failed.
    """
    if jax.process_count() == 1:
        return make()
    made: list[T] = []
    why = ""
    try:
        made.append(make())
    except errors as error:  # its text alone: the traceback would keep what `make` held
        why = " ".join(str(error).split()) or type(error).__name__
    if failed := [words for words in gathered(why) if words]:
        raise DhelixError(failed[0])
    return made[0]


def _message(what: str, found: list[str], hosts: list[str]) -> str:
    groups: dict[str, list[str]] = {}
    for process, (digest, host) in enumerate(zip(found, hosts, strict=True)):
        groups.setdefault(digest, []).append(f"process {process} ({host})")
    listed = "; ".join(f"{digest} on {', '.join(members)}" for digest, members in groups.items())
    return (
        f"hosts disagree on the {what}: {listed}. They would wait for each other for ever. "
        "Start every process with the same source, options, plan and profile files, XLA_FLAGS and package versions"
    )
