"""The points at which a decorated step takes part in the agreement between the processes of its job.

    run = FirstRun("step", options)  # at decoration
    with run.taking_part(on, kind, jitted, args, kwargs) as (enabled, key):  # at each call; agrees at the first
        ...  # lowered, transformed, compiled
    check_choice(...)  # once per program, before XLA compiles it
    check_order(...)  # and after that; `Job.leave` if something fails

A process that fails inside the context tells the others. So does a process that ends after it decorated a step. A step
takes part if its arguments or its program use devices of other processes. A step on this process's own devices waits
for nobody. The same step may be called both ways, so this is decided for each kind of arguments.
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
    """A decorated step's part in the agreement of its job."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        """
        Args:
          name: name of the step.
          options: options of `strand_interleave`, by name.
        """
        self._name = name
        self._options = options
        self._agreed: set[Job] = set()
        self._jobs: dict[Hashable, Job | None] = {}  # by kind of arguments
        self._lock = threading.RLock()  # so that several threads agree only once
        _tell_at_exit()
        if (job := rendezvous.everyone()) is not None:
            job.introduce()

    @contextlib.contextmanager
    def taking_part(
        self, on: Callable[[], bool], kind: Callable[[], Hashable], jitted: Any, args: Any, kwargs: Any
    ) -> Iterator[tuple[bool, Hashable | None]]:
        """Wraps everything between a call and the run of the compiled step.

        At the first call the processes agree on the step. An error inside the context stops all processes. The context
        yields the results of `on` and `kind`.

        Args:
          on: returns whether dhelix may change programs.
          kind: returns a key that is equal for calls that run the same program; None if that is unknown. It is not
            called in a single process with dhelix off.
          jitted: the step as `jax.jit` returned it.
          args, kwargs: arguments of the call.

        Raises:
          HostsDisagreeError: another process has another step, has failed, or does not come in time.
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
        """Forgets the kinds of arguments, but not the agreements."""
        with self._lock:
            self._jobs.clear()

    def _agree(self, enabled: bool, kind: Hashable, jitted: Any, args: Any, kwargs: Any) -> Job | None:
        """Agrees with the processes that run the step on these arguments and returns them; None if there are none."""
        with self._lock:
            if kind is not None and kind in self._jobs:
                return self._jobs[kind]
            job = _of_arguments(jitted, args, kwargs)
            if job is None:  # the function itself may choose the devices
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
    """Wraps a decoration: an error inside also stops the other processes when they next run a step."""
    try:
        yield
    except Exception as error:
        if (job := rendezvous.everyone()) is not None:
            job.fail(f"at decoration, {rendezvous.one_line(error)}")
        raise


def of_program(lowered: jax.stages.Lowered) -> Job | None:
    """The processes whose devices the program runs on; None if only this process has any."""
    return rendezvous.of(device.process_index for device in jax_compat.devices(lowered))


def check_choice(
    name: str,
    lowered: jax.stages.Lowered,
    manager: PassManager | None,
    memory_limit: int | None,
    left_alone: str | None,
    job: Job | None,
) -> None:
    """Checks, before XLA compiles, that all processes run the same passes or all leave the step alone.

    Args:
      name: name of the step.
      lowered: the lowered step before any pass.
      manager: holds the passes; None if an error left the step alone.
      memory_limit: bytes that the step may need on a GPU, arguments included, or None.
      left_alone: why the step is left alone, or None.
      job: the result of `of_program`.

    Raises:
      HostsDisagreeError: the processes differ. Raised in every process.
    """
    if job is None:
        return
    record = description.before_compiling(lowered, manager, memory_limit, left_alone)
    purpose, times = f"compile step {name!r}", AT_WORK
    if job.has_met(purpose):  # not the first program: the agreement at the first call did not bring all processes here
        purpose, times = f"compile another program of step {name!r}, for example for arguments of other shapes", 1
    agreement.check(purpose, record, job, times)


def check_order(name: str, compiled: jax.stages.Compiled | None, marker: str, job: Job | None) -> str | None:
    """Checks that all processes run the same collectives in the same order.

    Args:
      name: name of the step.
      compiled: the compiled step; None if it is left alone.
      marker: fingerprint of the passes' inputs, including the program.
      job: the result of `of_program`.

    Returns:
      The fingerprint of the order of collectives; None for a step that is left alone, or without a job.

    Raises:
      HostsDisagreeError: the processes differ. Raised in every process.
    """
    if job is None:
        return None
    order = None if compiled is None else fingerprint.collective_fingerprint(compiled_module(compiled))
    agreement.check(f"run the compiled step {name!r}", description.after_compiling(order, marker), job)
    return order


def _of_arguments(jitted: Any, args: Any, kwargs: Any) -> Job | None:
    """The processes whose devices hold arguments or appear in the step's shardings; None if there are no others."""
    leaves = [*jax.tree.leaves((args, kwargs)), *jax_compat.jit_shardings(jitted)]
    places = (getattr(leaf, "sharding", leaf) for leaf in leaves if not isinstance(leaf, Tracer))
    apart = {place for place in places if isinstance(place, jax.sharding.Sharding) and not place.is_fully_addressable}
    return rendezvous.of(device.process_index for place in apart for device in place.device_set)


@functools.cache
def _tell_at_exit() -> None:
    """Exit handlers run in reverse order, so this one runs before JAX, imported earlier, leaves the job."""
    atexit.register(_at_exit, os.getpid())


def _at_exit(process: int) -> None:
    """Tells the processes that would wait for this one. Does nothing in a fork of it."""
    if os.getpid() != process or jax_compat.coordination_client() is None:
        return
    error = getattr(sys, "last_exc", None)
    why = "it ended" if error is None else f"it ended with {rendezvous.one_line(error)}"
    everyone = rendezvous.everyone()
    for job in {*rendezvous.known(), *([] if everyone is None else [everyone])}:
        job.fail(why)
