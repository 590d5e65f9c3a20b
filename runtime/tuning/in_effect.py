"""Puts the settings of a plan's collectives into effect, in a job of any number of processes.

    prepare(plan)                                  # at decoration: before NCCL makes its first communicator
    applied = apply("step", plan, module, job)     # after compilation: the plugin gets the program's table
    applied.said                                   # one line for the headline
    applied.before_call()                          # at each call: says once if NCCL does not use the plugin

A job never depends on settings. If something is wrong in one process, all processes run on NCCL's defaults, and a line
in the log says why. Settings of one program do not touch the collectives of others, unless these look alike.

Why all ranks choose alike: all processes wait until their GPUs are idle, meet, compare the tables of all their
programs, and only then load them. So no collective sees one table on one rank and another table on another rank. A
program that only some processes of the job run has no settings: its table would also be looked into for communicators
that these processes share with others.

If a process made a communicator before it installed the plugin, NCCL never uses the plugin there. This shows only after
a collective has run. So in a job of several processes, the first call runs on NCCL's defaults. Before the second call,
the processes meet again, and load the tables only if NCCL uses the plugin in all of them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from dhelix.passes.framework.fingerprint import of_bytes
from dhelix.passes.framework.manager import say_once
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans.plan import Plan
from dhelix.passes.plans.tuned_collectives import settings_of
from dhelix.runtime.processes import agreement, rendezvous
from dhelix.runtime.processes.rendezvous import Job
from dhelix.runtime.profiling.provenance import nccl_version
from dhelix.runtime.tuning import plugin
from dhelix.runtime.tuning.plugin import TunerError
from dhelix.runtime.tuning.tables import table

_CALLS = 20  # after so many calls, NCCL has made the communicators of the step
_BEFORE = "NCCL made its communicators before the step was decorated, or knows no interface of the plugin"
_SAYS = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING says which"

_lock = threading.Lock()
_tables: dict[tuple[str, str], str] = {}  # of the programs whose settings are in effect, by step and table


@dataclass
class Applied:
    """What became of a plan's settings for one program.

    Attributes:
      step: name of the step.
      said: one line for people.
      works: whether the plugin has the program's table.
      pending: the program's table, if the plugin gets it before the second call; else None.
    """

    step: str
    said: str
    works: bool
    pending: _Pending | None = None
    _calls: int = field(default=0, repr=False)

    def before_call(self) -> None:
        """Loads a pending table before the second call. Logs once, after some calls, that NCCL uses no plugin.

        All processes of the job must call this together.
        """
        self._calls += 1
        if self.pending is not None and self._calls == 2:
            pending, self.pending = self.pending, None
            why = _unused(pending.job)
            if why:
                self._say(f"collectives run on NCCL's defaults: {why}")
            else:
                _put(pending.label, pending.text)
                self.works, self.said = True, pending.said
        elif self.works and self._calls == _CALLS and not _uses_plugin():
            self.works = False
            self._say(f"collectives run on NCCL's defaults: {_BEFORE} ({_SAYS})")

    def _say(self, what: str) -> None:
        self.said = what
        say_once(f"{self.step}: {what}", (self.step, what))


@dataclass(frozen=True)
class _Pending:
    """A table that all processes have agreed on, but that not all of them are known to use.

    Attributes:
      label, text: of the program and its table.
      said: what is said once the table is loaded.
      job: the processes that run the program.
    """

    label: str
    text: str
    said: str
    job: Job | None


def prepare(plan: Plan) -> None:
    """Builds the plugin and tells NCCL to use it, if the plan has settings. Says why, if that is impossible."""
    if plan.tuning is None or not plan.tuning.collectives:
        return  # without settings, the plugin must not be there: NCCL may choose otherwise beside it
    try:
        plugin.install()
    except TunerError as error:
        say_once(f"collectives run on NCCL's defaults: {error}", ("tuning", str(error)))
        return
    if variable := plugin.replaces_policy(os.environ):
        what = f"{variable} has no effect beside the plan's settings: unset it, or train without them"
        say_once(what, ("tuning", variable))


def apply(step: str, label: str, plan: Plan, module: HloModule, job: Job | None) -> Applied:
    """Gives the plugin the settings of a compiled program. All processes of the job must call this together.

    Args:
      step: name of the step.
      label: text that distinguishes the program from others.
      plan: has a tuning section.
      module: the program as it is compiled.
      job: the processes that run it.
    """
    assert plan.tuning is not None
    if not plan.tuning.collectives:
        return Applied(step, "collectives run on NCCL's defaults, which were fastest when they were tuned", works=False)
    text, why, count, of = "", _partial(job), 0, 0
    try:
        text, count, of = _table(plan, module)
    except Exception as error:  # whatever it is, the step runs without settings
        why = why or str(error) or type(error).__name__
    tables = {**_tables, (label, text): text}
    wait_for_gpus()
    here = why, of_bytes("\n".join(tables.values()).encode()), bool(why) or _uses_plugin()
    told = agreement.gathered(f"set the collectives of step {step!r}", json.dumps(here), job)
    each = [json.loads(one) for one in told]
    if why := _objection(each):
        said = f"collectives run on NCCL's defaults: {why}"
        say_once(f"{step}: {said}", (label, said))
        return Applied(step, said, works=False)
    said = _said(plan, count, of)
    if len(each) > 1 and not all(uses for *_, uses in each):
        later = f"{said}; in effect from the second call on, if all processes of the job use the plugin"
        return Applied(step, later, works=False, pending=_Pending(label, text, said, job))
    _put(label, text)
    return Applied(step, said, works=True)


def unset(tuning: str | Path | Plan | None, runs_plain: bool, on_gpus: bool) -> str:
    """Why a step cannot have the settings of the option `tuning`; "" if it can, or none are given.

    Args:
      runs_plain: whether `jax.jit` runs the step, because dhelix has left it alone.
      on_gpus: whether it runs on GPUs.
    """
    if not isinstance(tuning, Plan) or tuning.tuning is None or not tuning.tuning.collectives:
        return ""
    if runs_plain:
        why = "dhelix sets those of steps that it changes, and this one runs as it is"
        return f"collectives run on NCCL's defaults: {why}"
    return "" if on_gpus else "settings of collectives have no effect: the step does not run on GPUs"


def restore() -> None:
    """Loads the settings that are in effect, after something else was loaded. No collective may run meanwhile."""
    plugin.install().load("\n".join(_tables.values()))


def _put(label: str, text: str) -> None:
    with _lock:
        _tables[label, text] = text
        restore()


def _uses_plugin() -> bool:
    """Whether NCCL is known to use the plugin in this process."""
    try:
        return plugin.install().counts().communicators > 0
    except TunerError:
        return False


def _unused(job: Job | None) -> str:
    """Which process does not use the plugin after a call, and why; "" if all do. Waits for the GPUs."""
    wait_for_gpus()
    told = agreement.gathered("see whether NCCL uses the plugin in all processes", json.dumps(_uses_plugin()), job)
    without = [n for n, text in enumerate(told) if not json.loads(text)]
    if not without:
        return ""
    if len(without) == len(told):
        return f"{_BEFORE} ({_SAYS})"
    return f"in process {without[0]} of {len(told)}, {_BEFORE}; so no process uses the settings"


def _partial(job: Job | None) -> str:
    """Why a program of these processes has no settings; "" if all processes run it."""
    everyone = rendezvous.everyone()
    if everyone is None or (job is not None and job.processes == everyone.processes):
        return ""
    return "only some processes of the job run the step, and their communicators with others must choose as before"


def _objection(told: Sequence[tuple[str, str, bool]]) -> str:
    """Why no process uses the settings; "" if all can.

    Args:
      told: by each process: its own objection, the digest of its tables, and whether NCCL is known to use the plugin.
    """
    whys, digests, _ = zip(*told, strict=True)
    if why := next(filter(None, whys), ""):
        return why
    if len(set(digests)) > 1:
        return "the processes would set them differently"
    return ""


def _table(plan: Plan, module: HloModule) -> tuple[str, int, int]:
    """The program's table, and how many of the plan's collectives the program has, of how many."""
    assert plan.tuning is not None
    plugin.install()
    here, devices = nccl_version(), int(np.prod(module.device_counts))
    again = "tune again with `dhelix tune`"
    if here and here.split(".")[:2] != plan.tuning.nccl.split("."):
        raise TunerError(f"they were tuned under NCCL {plan.tuning.nccl}, and this is {here}: {again}")
    if devices != plan.tuning.devices:
        raise TunerError(f"they were tuned on {plan.tuning.devices} GPUs, and the step runs on {devices}: {again}")
    settings, missing = settings_of(plan, module)
    if not settings:
        raise TunerError(f"the step has none of the plan's {len(missing)} collectives, so it is another step: {again}")
    return table(module, settings), len(plan.tuning.collectives) - len(missing), len(plan.tuning.collectives)


def _said(plan: Plan, count: int, of: int) -> str:
    assert plan.tuning is not None
    lacks = f", {of - count} that it lacks left out" if count < of else ""
    gain = plan.tuning.default_us / plan.tuning.tuned_us if plan.tuning.tuned_us else 0.0
    measured = f"; {gain:.3f} x as fast as NCCL's defaults when they were tuned" if gain else ""
    return f"{count} collectives have the plan's settings under NCCL{lacks}{measured}"


def wait_for_gpus() -> None:
    """Waits until the GPUs of this process are idle. Programs run on a GPU in the order in which they were started."""
    last = [jax.device_put(np.zeros((), np.int32), device) + 1 for device in jax.local_devices()]
    jax.block_until_ready(last)
