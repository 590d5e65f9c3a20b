"""Looks at every program that this process compiles, and interleaves the steps among them.

    install(Policy())      # once in a process; `dhelix run`, `import dhelix.auto` and DHELIX_AUTO do this

    JAX compiles a program      on one device, or without gradients      as without dhelix, from the same bytes
                                gradients of one micro-batch             as without dhelix, from the same bytes
                                otherwise                                as a decorated step: `Specialization`
                                nothing changed, or something failed     as without dhelix, from the same bytes

JAX has one place at which lowered programs become executables (`jax_compat.catch_compilations`), so it does not matter
which library jitted a function. What a decorator does with calls is missing here: arguments are not split, `verify`
does not exist. In a job of several processes, all of them must run with the same policy, because they compare their
programs as decorated steps do.

Cost: a look at the text of a program (`micro_batches.py`). Only steps that may have
several micro-batches pay for more.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dhelix.errors import DhelixError
from dhelix.passes import jax_compat
from dhelix.runtime.undecorated import across_calls, micro_batches, seen
from dhelix.runtime.undecorated.policy import Policy
from dhelix.runtime.undecorated.seen import CHANGED, FAILED, LEFT_ALONE, Seen

_OF_STRANDS = frozenset({"skew", "memory_limit", "max_in_flight", "disable", "profile"})
"""Options without effect on a step that does not become two strands."""

_ONE = f"the step {across_calls.NO_LOOP}"


class Catch:
    """The catcher of one process.

    Attributes:
      seen: the programs with gradients on several devices, in the order of their compilation.
      others: the number of all other programs.
    """

    def __init__(self, policy: Policy) -> None:
        self.seen: list[Seen] = []
        self.others = 0
        self._policy = policy
        self._busy = threading.local()
        self._number = 0
        self._undo = jax_compat.catch_compilations(self._change)

    def undo(self) -> None:
        """Lets JAX compile as without dhelix again."""
        self._undo()

    def report(self) -> str:
        """What happened so far, for people."""
        return seen.text(self.seen, self.others)

    def _change(self, lowered: jax.stages.Lowered) -> jax_compat.Changed | None:
        """What runs instead of the program, or None."""
        if getattr(self._busy, "on", False):  # dhelix itself compiles
            return None
        self._busy.on = True
        start = time.perf_counter()
        name, devices = "", 0
        try:
            name = jax_compat.program_name(lowered)
            devices = len(jax_compat.devices(lowered))
            program = jax_compat.debug_text(lowered) if devices > 1 else ""
            if micro_batches.BACKWARD not in program:  # it takes no gradients
                self.others += 1
                return None
            options = self._policy.of(name)
            if not self._policy.allows(name):
                changed, found = None, (LEFT_ALONE, ("the options of dhelix run leave it out",))
            elif _OF_STRANDS.issuperset(options) and not micro_batches.may_hold(program):
                changed, found = None, (LEFT_ALONE, (across_calls.explained(_ONE, program),))
            else:
                changed, found = self._interleave(name, lowered, program, options)
        except Exception as error:  # whatever goes wrong here, the user's program goes on
            changed, found = None, (FAILED, (" ".join(f"{type(error).__name__}: {error}".split())[:300],))
        finally:
            self._busy.on = False
        self.seen.append(Seen(name, devices, *found, time.perf_counter() - start))
        return changed

    def _interleave(
        self, name: str, lowered: jax.stages.Lowered, program: str, given: Mapping[str, Any]
    ) -> tuple[jax_compat.Changed | None, tuple[str, tuple[str, ...]]]:
        # Imported here, so that programs without steps do not wait for it.
        from dhelix.passes.framework import headline, manager
        from dhelix.runtime.compiler import registration
        from dhelix.runtime.step.loaded_options import loaded
        from dhelix.runtime.step.options import StepOptions
        from dhelix.runtime.step.specialization import Specialization

        if off := registration.switched_off():
            return None, (LEFT_ALONE, (f"dhelix {off}",))
        self._number += 1
        with manager.heard() as said:
            options = loaded(StepOptions(**given))
            chosen = Specialization(name.removeprefix("jit_"), f"{name} {self._number}", options, lowered)
            compiled: Any = None if chosen.left_alone else chosen.compile()
            done = chosen.report()
        if compiled is None or done.left_alone:
            why = done.left_alone or next(iter(said), "no pass found anything to do")
            return None, (LEFT_ALONE, (across_calls.explained(why, program),))
        return (chosen.lowered, compiled), (CHANGED, tuple(headline.headline(done)))


_installed: list[Catch] = []


def install(policy: Policy) -> Catch:
    """Begins to look at the programs of this process. A second call changes nothing.

    Raises:
      DhelixError: this jax compiles programs at another place than dhelix knows.
    """
    if not _installed:
        made = Catch(policy)
        _installed.append(made)
        atexit.register(_at_exit, made, policy, os.getpid())
    return _installed[0]


def report() -> str:
    """What happened to the programs of this process so far; "" if nothing is installed."""
    return _installed[0].report() if _installed else ""


def _at_exit(made: Catch, policy: Policy, process: int) -> None:
    """Prints and writes the report, in the process that installed the catcher.

    If it compiled no step, it reports nothing: a helper, or a program that failed. The program of `dhelix run` itself
    then still says so.
    """
    failed = hasattr(sys, "last_exc")  # Python has printed a traceback
    if os.getpid() != process or not (made.seen or (process == policy.process and not failed)):
        return
    if jax_compat.coordination_client() is not None and jax_compat.process_number():
        return
    try:
        if policy.report:
            seen.write(made.seen, made.others, Path(policy.report))
        if not policy.quiet:
            print(made.report(), file=sys.stderr)
    except (OSError, DhelixError) as error:
        print(f"dhelix run: the report cannot be written: {error}", file=sys.stderr)
