"""Where a decorated step takes part in what the processes of its job agree on.

    run = FirstRun("step", options)  # at decoration
    with run.taking_part(on, kind, jitted, args, kwargs) as (enabled, key):  # at each call; agrees at the first
        ...  # lowered, transformed, compiled
    check_choice(...)  # once a program, before XLA compiles it
    check_order(...)  # and after that; `Job.leave` where something fails

Whoever fails inside says so to the others, and so does a process that ends with a decorated step. A step takes part
whose arguments, or whose program, have devices of other processes; one of this process's own devices waits for nobody.
One step may be called both ways, so every kind of arguments is looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer

from dhelix.errors import HostsDisagreeError
from dhelix.passes import jax_compat
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.manager import PassManager
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.processes import agreement, description, rendezvous
from dhelix.runtime.processes.rendezvous import AT_WORK, Job


class FirstRun:
    """A decorated step, as the other processes of the job are to know it."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        """
        Args:
          name: of the step.
          options: of `strand_interleave`, by name.
        """
        self._name = name
        self._options = options
        self._agreed: set[Job] = set()
        self._jobs: dict[Hashable, Job | None] = {}  # by kind of arguments
        self._lock = threading.RLock()  # so that threads agree once
        _tell_at_exit()
        if (job := rendezvous.everyone()) is not None:
            job.introduce()

    @contextlib.contextmanager
    def taking_part(
        self, on: Callable[[], bool], kind: Callable[[], Hashable], jitted: Any, args: Any, kwargs: Any
    ) -> Iterator[tuple[bool, Hashable | None]]:
        """Around all that happens between a call and the run of a compiled step: at the first one the processes agree
        on the step, and what is raised inside stops all of them.

        Args:
          on: says whether dhelix may touch programs. The context gives its result, and that of `kind`.
          kind: tells apart what calls run; None where that is not known. Not called where nobody needs it.
          jitted: the step as `jax.jit` made it.
          args, kwargs: of the call.

        Raises:
          HostsDisagreeError: another process has another step, or has failed, or does not come.
        """
        if jax_compat.coordination_client() is None or jax_compat.process_total() < 2:
            enabled = on()
            yield enabled, kind() if enabled else None
            return
        job = None
        try:
            enabled = on()
            key = kind()
            job = self._agree(enabled, key, jitted, args, kwargs)
            yield enabled, key
        except (HostsDisagreeError, GeneratorExit):
            raise
        except BaseException as error:
            if (job := job or _of_arguments(jitted, args, kwargs)) is not None:
                job.fail(rendezvous.one_line(error))
            raise

    def clear(self) -> None:
        """Forgets kinds of arguments, not what was agreed."""
        with self._lock:
            self._jobs.clear()

    def _agree(self, enabled: bool, kind: Hashable, jitted: Any, args: Any, kwargs: Any) -> Job | None:
        """The processes that run the step with these arguments, which have agreed; None if it is this one alone."""
        with self._lock:
            if kind is not None and kind in self._jobs:
                return self._jobs[kind]
            job = _of_arguments(jitted, args, kwargs)
            if job is None:  # the function itself may say where it runs
                job = of_program(jitted.lower(*args, **kwargs))
            if job is not None and job not in self._agreed:
                record = description.before_tracing(enabled, self._options, jitted)
                agreement.check(f"run step {self._name!r}", record, job, times=1)
                self._agreed.add(job)
            if kind is not None:
                self._jobs[kind] = job
            return job


@contextlib.contextmanager
def decorating() -> Iterator[None]:
    """Around a decoration: what it raises stops the other processes, too, once they run a step."""
    try:
        yield
    except Exception as error:
        if (job := rendezvous.everyone()) is not None:
            job.fail(f"at decoration, {rendezvous.one_line(error)}")
        raise


def of_program(lowered: jax.stages.Lowered) -> Job | None:
    """The processes whose devices a program runs on; None if that is this one alone."""
    return rendezvous.of(device.process_index for device in jax_compat.devices(lowered))


def check_choice(
    name: str,
    lowered: jax.stages.Lowered,
    manager: PassManager | None,
    memory_limit: int | None,
    left_alone: str | None,
    job: Job | None,
) -> None:
    """Checks that all processes run the same passes, or all leave the step alone; before XLA compiles.

    Args:
      name: of the step.
      lowered: the step as the user's function lowers.
      manager: of the passes; None if there is none of a step that is left alone.
      memory_limit: bytes beside its arguments, if there is one.
      left_alone: why the step is left alone, or None.
      job: `of_program`.

    Raises:
      HostsDisagreeError: in every process.
    """
    if job is None:
        return
    record = description.before_compiling(lowered, manager, memory_limit, left_alone)
    purpose, times = f"compile step {name!r}", AT_WORK
    if job.has_met(purpose):  # nobody has come to the step before, as all do before its first program
        purpose, times = f"compile another program of step {name!r}, as for arguments of other shapes", 1
    agreement.check(purpose, record, job, times)


def check_order(name: str, compiled: jax.stages.Compiled | None, marker: str, job: Job | None) -> str | None:
    """Checks that all processes run the same collectives in the same order.

    Args:
      compiled: the step; None if it is left alone.
      marker: fingerprint of what the passes were given, the program first of all.

    Returns:
      The fingerprint of the order of collectives; None for a step that is left alone, and without a job, where it is
      not computed.

    Raises:
      HostsDisagreeError: in every process.
    """
    if job is None:
        return None
    order = None if compiled is None else fingerprint.collective_fingerprint(compiled_module(compiled))
    agreement.check(f"run the compiled step {name!r}", description.after_compiling(order, marker), job)
    return order


def _of_arguments(jitted: Any, args: Any, kwargs: Any) -> Job | None:
    """The processes whose devices hold arguments, or are named in the shardings of the step; None if these do not tell
    of any others."""
    leaves = [*jax.tree.leaves((args, kwargs)), *jax_compat.jit_shardings(jitted)]
    places = (getattr(leaf, "sharding", leaf) for leaf in leaves if not isinstance(leaf, Tracer))
    apart = {place for place in places if isinstance(place, jax.sharding.Sharding) and not place.is_fully_addressable}
    return rendezvous.of(device.process_index for place in apart for device in place.device_set)


@functools.cache
def _tell_at_exit() -> None:
    """JAX, imported earlier, leaves the job after this."""
    atexit.register(_at_exit, os.getpid())


def _at_exit(process: int) -> None:
    """Tells those that would wait for this process; not in a fork of it."""
    if os.getpid() != process or jax_compat.coordination_client() is None:
        return
    error = getattr(sys, "last_exc", None)
    why = "it ended" if error is None else f"it ended with {rendezvous.one_line(error)}"
    everyone = rendezvous.everyone()
    for job in {*rendezvous.known(), *([] if everyone is None else [everyone])}:
        job.fail(why)
