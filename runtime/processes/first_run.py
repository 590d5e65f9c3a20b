"""Defines the points at which a decorated step compares itself with the same step in the job's other processes.

    run = FirstRun("step", options)  # at decoration
    with run.taking_part(on, kind, jitted, args, kwargs) as (enabled, key):  # at each call; the first call compares
        ...  # lowered, transformed, compiled
    check_choice(...)  # once per program, before XLA compiles it
    check_order(...)  # once per program, after XLA has compiled it; if something fails, `Job.leave` instead

If a process fails inside the context, or ends after it decorated a step, it tells the other processes. A step takes
part in the comparison if its arguments or its program use devices of other processes. A step that uses only devices of
its own process does not wait for other processes. A step may be called in both ways, so each kind of arguments (shapes,
types, shardings) is decided on its own.

"Left alone" means that a step runs without passes, as under `jax.jit`.
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
    """Compares one decorated step with the same step in the job's other processes, at its first call."""

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
        """Wraps everything that happens between a call of the step and the run of the compiled step.

        At the first call, all processes compare package versions and the step's options. An error inside the context
        stops all processes. The context yields the results of `on` and `kind`.

        Args:
          on: returns whether dhelix may change programs.
          kind: returns a key that is equal for calls that run the same program, or None if no key is known. In a single
            process with dhelix off, `kind` is not called, and the context yields None in its place.
          jitted: the step as `jax.jit` returned it.
          args, kwargs: arguments of the call.

        Raises:
          HostsDisagreeError: another process has a different step, has failed, or does not come in time.
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
        """Forgets which job runs each kind of arguments. Jobs that have compared the step do not compare it again."""
        with self._lock:
            self._jobs.clear()

    def _agree(self, enabled: bool, kind: Hashable, jitted: Any, args: Any, kwargs: Any) -> Job | None:
        """Returns the job of all processes that run the step on these arguments, or None if only this process runs it.

        If the job has not compared the step yet, the step is compared first.
        """
        with self._lock:
            if kind is not None and kind in self._jobs:
                return self._jobs[kind]
            job = _of_arguments(jitted, args, kwargs)
            if job is None:  # the step's function may choose devices that no argument is on
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
    """Wraps the decoration of a step. After an error inside, the other processes stop when they next run a step."""
    try:
        yield
    except Exception as error:
        if (job := rendezvous.everyone()) is not None:
            job.fail(f"at decoration, {rendezvous.one_line(error)}")
        raise


def of_program(lowered: jax.stages.Lowered) -> Job | None:
    """The job of all processes whose devices the program runs on; None if it uses devices of this process only."""
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
      manager: holds the passes. None: the step is left alone because of an error.
      memory_limit: bytes that the step may need on a GPU, arguments included. None: there is no limit.
      left_alone: the reason if the step is left alone, or None.
      job: the result of `of_program`.

    Raises:
      HostsDisagreeError: the processes differ. Every process raises this error.
    """
    if job is None:
        return
    record = description.before_compiling(lowered, manager, memory_limit, left_alone)
    purpose, times = f"compile step {name!r}", AT_WORK
    if job.has_met(purpose):  # not the step's first program, so no meeting just before has brought all processes here
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
      The fingerprint of the order of collectives; None if the step is left alone or `job` is None.

    Raises:
      HostsDisagreeError: the processes differ. Every process raises this error.
    """
    if job is None:
        return None
    order = None if compiled is None else fingerprint.collective_fingerprint(compiled_module(compiled))
    agreement.check(f"run the compiled step {name!r}", description.after_compiling(order, marker), job)
    return order


def _of_arguments(jitted: Any, args: Any, kwargs: Any) -> Job | None:
    """The job of all processes whose devices hold arguments or appear in the step's shardings.

    None if these are devices of this process only.
    """
    leaves = [*jax.tree.leaves((args, kwargs)), *jax_compat.jit_shardings(jitted)]
    places = (getattr(leaf, "sharding", leaf) for leaf in leaves if not isinstance(leaf, Tracer))
    apart = {place for place in places if isinstance(place, jax.sharding.Sharding) and not place.is_fully_addressable}
    return rendezvous.of(device.process_index for place in apart for device in place.device_set)


@functools.cache
def _tell_at_exit() -> None:
    """Registers the exit handler `_at_exit`.

    Exit handlers run in the reverse order of their registration. JAX registers its own handler when it is imported,
    which is earlier. So this handler runs before JAX leaves the job.
    """
    atexit.register(_at_exit, os.getpid())


def _at_exit(process: int) -> None:
    """Tells the other processes of all jobs that this process ends. In a fork of the process, it does nothing."""
    if os.getpid() != process or jax_compat.coordination_client() is None:
        return
    error = getattr(sys, "last_exc", None)
    why = "it ended" if error is None else f"it ended with {rendezvous.one_line(error)}"
    everyone = rendezvous.everyone()
    for job in {*rendezvous.known(), *([] if everyone is None else [everyone])}:
        job.fail(why)
