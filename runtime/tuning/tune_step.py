"""Tunes the collectives of a step on the GPUs of this job: the implementation of `dhelix tune` and `dhelix.tune`.

    tuned = dhelix.tune(train_step, state, batch, out="tuned.json")
    print(tuned)                                           # times of a step by who chose the settings
    step = strand_interleave(train_step, plan="tuned.json")

    1  compile the step and run it             NCCL must ask in the program's launch order
    2  trace it with NCCL's defaults, twice    overlaps, their times, and the noise
    3  search                                  `step_search.py`
    4  measure the candidates by turns         without the profiler; NCCL's defaults stay unless another one is faster
    5  order the step for the new times        and tune again, as long as this gains (`reordering.py`)

The settings are for this program, this number of GPUs, this launch setting and this version of NCCL. Steps run during
tuning, on copies: the arguments stay, and take memory beside them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax

from dhelix.errors import DhelixError
from dhelix.passes.framework.fingerprint import of_bytes
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import Plan
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.passes.tuning.measurements import LimitReached
from dhelix.passes.tuning.space import Space
from dhelix.profiles.channels.channel_model import ChannelSetting
from dhelix.profiles.channels.model_fit import MeasuredTimes, fit
from dhelix.profiles.hardware import gpu_name
from dhelix.runtime.compiler import lowering
from dhelix.runtime.processes import agreement
from dhelix.runtime.processes.launch_settings import link_of, target_of
from dhelix.runtime.processes.nodes import gpus_per_node
from dhelix.runtime.profiling.provenance import nccl_version
from dhelix.runtime.step.interleaved_step import InterleavedStep
from dhelix.runtime.step.options import StepOptions
from dhelix.runtime.step.strand_interleave import interleaved
from dhelix.runtime.tuning import plugin
from dhelix.runtime.tuning.bodies import LEAST_NOISE, MOST_NOISE, Body, BodyTimes, StepTimes, are_of, noise_of
from dhelix.runtime.tuning.plugin import TunerError
from dhelix.runtime.tuning.records import Records, digest, read
from dhelix.runtime.tuning.reordering import Reordering, repeated
from dhelix.runtime.tuning.step_search import DEFAULTS, TUNED, Found, StepSearch, StepSettings, failed
from dhelix.runtime.tuning.trials import StepTrials
from dhelix.runtime.tuning.tuned import Start, Tuned

CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = tuple(1 << n for n in range(16, 23))
"""Bytes of chunks that are tried where NCCL lets them be set for each collective (2.30 and later)."""

_VERSION = re.compile(r"\d+\.\d+")
_CHUNKS_FROM = (2, 30)
_NO_MATTER = ("NCCL_DEBUG", "NCCL_TUNER_PLUGIN")
"""Variables that change no time."""

_ROUNDS, _ROUNDS_OF_ONE = 5, 2
_CANDIDATES, _MOST_COMPARING = 4, 0.25
"""How many candidates are compared, and the most of the time that is kept for this."""

_MOST_SLOWS = 4.0


def tune(
    step: Callable[..., Any],
    *arguments: Any,
    out: str | Path | None = None,
    plan: str | Path | Plan | None = None,
    minutes: float = 10.0,
    order: bool = True,
    records: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    measured: Callable[[], None] | None = None,
    name: str | None = None,
    use_up: bool = False,
) -> Tuned:
    """Tunes the collectives of a train step under NCCL. All processes of a job must call this together.

    Args:
      step: a decorated step, or a function that is decorated with the defaults.
      arguments: arguments of the step. They stay, also if the step donates them: then a copy is used up. So there must
        be room for two states.
      out: plan file to write; None writes none.
      plan: a plan of the step, to which the settings are added. The step must be decorated with it.
      minutes: time after which the search stops with the best so far. With 0, only NCCL's defaults are measured, and
        the settings of `plan`.
      order: whether the step may be ordered anew for the tuned collectives.
      records: file of measurements. A call that was interrupted goes on from there.
      progress: called with a line on what comes next.
      measured: called after each measurement. Models are fitted then, which takes time, but not on the GPUs.
      name: of the program, for the plan; default: the name of the step.
      use_up: whether donated arguments may be used up. Then there is one state, as in training.

    Raises:
      DhelixError: there is no GPU, NCCL does not use the plugin, the step runs on one GPU, or its arguments are not
        arrays.
    """
    start = time.monotonic()
    deadline = start + 60.0 * minutes
    told, ended = progress or (lambda _: None), measured or (lambda: None)
    decorated = step if isinstance(step, InterleavedStep) else interleaved(step, StepOptions())
    if jax.default_backend() != "gpu":
        raise DhelixError(f"tuning needs GPUs, but this process runs on {jax.default_backend()}; see `nvidia-smi`")
    if not _VERSION.match(nccl_version()):
        raise DhelixError("the version of NCCL is unknown, for which settings would be: install NCCL with pip")
    if decorated._front(arguments, {}) is not None:
        raise DhelixError(f"{decorated.__name__}: dhelix.tune takes arrays as arguments; split other objects first")
    prepare()
    base = _base(plan, decorated, name or decorated.__name__)
    told("compiles the step")
    lowered = decorated.lower(*arguments)
    if lowering.device_count(lowered) < 2:
        raise DhelixError(f"{decorated.__name__} runs on one device, which has no collectives to tune")
    static, _ = decorated.static_positions(arguments)
    given = tuple(one for n, one in enumerate(arguments) if n not in static)
    kept = None if records is None else Path(records)
    last = [StepTrials(lowered, given, base.target, use_up)]
    tuning = Tuning(last[0], base, told, start, minutes, ended)
    first = tuning.run(out, kept)
    if not order or not first.settings:
        return first
    reordering = Reordering(decorated, arguments, first.plan, told)

    def again(new: Plan, best: Tuned, moved: Collection[str]) -> Tuned:
        values = iter(last[0].arguments)
        whole = [one if n in static else next(values) for n, one in enumerate(arguments)]
        ordered = reordering.step(new)
        made = StepTrials(ordered.lower(*whole), last[0].arguments, base.target, use_up)
        last[0] = made  # frees the program before
        try:
            reordering.check(ordered)
        except DhelixError:
            made.end()
            raise
        limit = agreement.largest("compare memory", max(made.memory, new.order.memory_limit))
        new = replace(new, order=replace(new.order, memory_limit=limit))
        left = (deadline - time.monotonic()) / 60.0
        anew = Tuning(made, new, told, time.monotonic(), left, ended)
        return anew.run(None, kept, Start(made.known(best.settings), moved, best.alone))

    tuned = repeated(first, reordering.ordered, again, lambda: _late(deadline - tuning.comparison), told)
    save(tuned.plan, out)
    return replace(tuned, spent=time.monotonic() - start)


def prepare() -> None:
    """Tells NCCL to use the plugin. Call it before any collective runs.

    Raises:
      TunerError: there is no plugin, or NCCL's defaults would not be those that it has without one.
    """
    if variable := plugin.replaces_policy(os.environ):
        raise TunerError(
            f"{variable} has no effect beside a tuner plugin, so nothing can be compared with NCCL's own choice: unset "
            "it to tune, or train without settings"
        )
    plugin.install()


def save(plan: Plan, out: str | Path | None) -> None:
    """Writes a plan in the first process, if `out` is a path. All processes call this together."""
    if out is not None:
        agreement.together("write the plan", lambda: plan_files.save(plan, out), (DhelixError,))


def _late(deadline: float) -> bool:
    """Whether the time is over, by the clock of any process."""
    return bool(agreement.largest("compare clocks", int(time.monotonic() > deadline)))


class Trials(Protocol):
    """What `Tuning` needs of `StepTrials`."""

    @property
    def key(self) -> str: ...
    @property
    def surprise(self) -> str: ...
    @property
    def devices(self) -> int: ...
    @property
    def sends(self) -> bool: ...
    def bodies(self) -> tuple[Body, ...]: ...
    def times(self, bodies: Sequence[Body], settings: StepSettings) -> StepTimes: ...
    def seconds(self, settings: StepSettings) -> float: ...
    def end(self) -> None: ...


class Tuning:
    """One tuning; `tune` runs it.

    Attributes:
      comparison: seconds that are kept for the comparison of candidates, once a trace has shown how long a step takes.
    """

    def __init__(
        self,
        trials: Trials,
        base: Plan,
        told: Callable[[str], None],
        start: float,
        minutes: float,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._trials, self._base = trials, base
        self._ended = ended
        self._told, self._start, self._deadline = told, start, start + 60.0 * minutes
        self._notes: list[str] = []
        self.comparison = 0.0

    def run(self, out: str | Path | None, records: Path | None, start: Start | None = None) -> Tuned:
        try:
            return self._run(out, records, start)
        finally:
            self._trials.end()

    def _run(self, out: str | Path | None, records: Path | None, start: Start | None) -> Tuned:
        if surprise := next(filter(None, agreement.gathered("compare what NCCL asked", self._trials.surprise)), ""):
            raise DhelixError(
                f"NCCL does not ask about collectives in the program's launch order: {surprise}; so settings would "
                "reach the wrong collectives"
            )
        # Step 2.
        self._told("traces the step")
        searches = self._deadline > self._start
        bodies = self._trials.bodies() if searches else ()
        noise = LEAST_NOISE
        if bodies:
            self._told("traces the step again, for the noise")
            began = time.monotonic()
            noise = noise_of(bodies, self._trials.times(bodies, {}))
            one = time.monotonic() - began  # a trace runs as many steps as a time
            self.comparison = min(_ROUNDS * _CANDIDATES * one, _MOST_COMPARING * (self._deadline - self._start))
        # Step 3.
        measure = self._measure(bodies, records)
        if bodies:
            search = StepSearch(bodies, measure, _space(), noise, self._told)
            found = search.run() if start is None else search.run_from(start.settings, start.moved)
        else:
            why = "it asks a plugin about no collective that takes time" if searches else ""
            known = () if searches or self._base.tuning is None else self._base.tuning.collectives
            given = {TUNED: {one.identity: one.setting for one in known}} if known else {}
            found = Found({DEFAULTS: {}, **given}, {}, {}, 0, why)
        if found.stopped:
            self._notes.append(f"NCCL's defaults stay where nothing was tried: {found.stopped}")
        # Step 4.
        seconds, chance = self._compare(found.candidates)
        self._ended()
        best = _fastest(seconds, found.candidates, chance)
        alone = {body.fingerprint: _alone(body, found.maps.get(body.fingerprint, {})) for body in bodies}
        alone |= start.alone if start else {}
        rows = self._rows(found.candidates[best], bodies, measure, alone, noise)
        plan = replace(self._base, tuning=self._section(rows, seconds[DEFAULTS], seconds[best]))
        save(plan, out)
        spent = time.monotonic() - self._start
        notes, sends = tuple(self._notes), self._trials.sends
        return Tuned(plan, seconds, bodies, found, noise, spent, notes, chance, alone, sends=sends)

    def _measure(self, bodies: Sequence[Body], path: Path | None) -> Callable[[StepSettings], StepTimes]:
        target = self._base.target
        nccl = sorted((n, v) for n, v in os.environ.items() if n.startswith("NCCL_") and not n.startswith(_NO_MATTER))
        here = target.hardware, target.link, target.environment, target.xla_flags, nccl_version(), nccl
        text = agreement.together("read the records", lambda: read(path), (DhelixError,))
        own = json.dumps([of_bytes(f"{self._trials.key} {here}".encode()), text])
        # All processes know what the first one knows, and only that one writes. Otherwise one would measure alone.
        program, text = json.loads(agreement.gathered("compare records", own)[0])
        known = Records(path if jax.process_index() == 0 else None, program, text)

        def measured(settings: StepSettings) -> StepTimes:
            times = known.find(settings)
            if times is not None and are_of(bodies, times):
                return times
            if why := known.failed.get(digest(settings)):
                self._notes.append(f"settings that failed count as slow: {why}")
                return failed(bodies)
            if _late(self._deadline - self.comparison):
                raise LimitReached(f"{(self._deadline - self._start) / 60.0:g} minutes have passed")
            agreement.together("begin a measurement", lambda: known.begin(settings), (DhelixError,))
            times = self._trials.times(bodies, settings)
            agreement.together("keep a measurement", lambda: known.end(settings, times), (DhelixError,))
            return times

        def measure(settings: StepSettings) -> StepTimes:
            try:
                return measured(settings)
            finally:
                self._ended()

        return measure

    def _compare(self, candidates: Mapping[str, StepSettings]) -> tuple[dict[str, float], float]:
        """The median time of a step under each candidate, and the relative difference that may be chance.

        Candidates take turns, so that a drift hits all alike. The difference follows from the spread of NCCL's
        defaults: two standard errors of a median.
        """
        different = {digest(settings): settings for settings in candidates.values()}
        times: dict[str, list[float]] = {key: [] for key in different}
        rounds = _ROUNDS if len(different) > 1 else _ROUNDS_OF_ONE
        for turn in range(rounds):
            for key, settings in different.items():
                self._told(f"compares {len(different)} candidates, turn {turn + 1} of {rounds}")
                times[key].append(self._trials.seconds(settings))
        found = {name: statistics.median(times[digest(settings)]) for name, settings in candidates.items()}
        spread = statistics.stdev(times[digest(candidates[DEFAULTS])]) / found[DEFAULTS]
        return found, min(max(2.5 * spread / math.sqrt(rounds), LEAST_NOISE), MOST_NOISE)

    def _rows(
        self,
        chosen: StepSettings,
        bodies: Sequence[Body],
        measure: Callable[[StepSettings], StepTimes],
        alone: Mapping[str, float],
        noise: float,
    ) -> tuple[TunedCollective, ...]:
        """The chosen settings, with the times of each collective in the step."""
        if chosen and not bodies and self._base.tuning is not None:
            return self._base.tuning.collectives  # with the times that the search has measured
        times: StepTimes = {}
        if chosen:
            self._told("the times under the chosen settings")
            with contextlib.suppress(LimitReached):  # then the plan has no times, and the order stays
                times = measure(chosen)
        rows = {identity: TunedCollective(*identity, setting) for identity, setting in chosen.items()}
        for body in (body for body in bodies if body.fingerprint in times):
            found, slows = times[body.fingerprint], _slows(body, times[body.fingerprint], alone, noise)
            for identity, own, default in zip(
                body.collectives, found.collectives, body.default.collectives, strict=True
            ):
                if identity in rows:
                    rows[identity] = replace(rows[identity], us=_us(own), default_us=_us(default), slows=slows)
        return tuple(rows[identity] for identity in sorted(rows))

    def _section(self, rows: tuple[TunedCollective, ...], default: float, tuned: float) -> CollectiveSettings:
        version = ".".join(nccl_version().split(".")[:2])
        return CollectiveSettings(version, self._trials.devices, rows, _us(default), _us(tuned))


def _us(seconds: float) -> float:
    """Microseconds, as precise as in a plan's file."""
    return float(f"{1e6 * seconds:.6g}")


def _fastest(seconds: Mapping[str, float], candidates: Mapping[str, StepSettings], chance: float) -> str:
    """The fastest candidate; NCCL's defaults if nothing is faster than these by more than chance.

    Of candidates that are equally fast, the one that needs the fewest settings counts.
    """
    as_fast = [name for name in candidates if seconds[name] <= min(seconds.values()) * (1.0 + chance)]
    return DEFAULTS if DEFAULTS in as_fast else TUNED if TUNED in as_fast else as_fast[0]


def _alone(body: Body, known: Mapping[ChannelSetting, BodyTimes]) -> float:
    """Seconds that a body computes without collectives, by the channel model; 0 if it was not measured."""
    if not known:
        return 0.0
    measured = [
        MeasuredTimes((setting,) * len(body.collectives), times.collectives, times.computations)
        for setting, times in known.items()
    ]
    return sum(fit(body.overlap, measured).alone)


def _slows(body: Body, found: BodyTimes, alone: Mapping[str, float], noise: float) -> float:
    """What computation loses beside its collectives, as a multiple of what it loses under NCCL's defaults."""
    least, default, now = alone.get(body.fingerprint, 0.0), sum(body.default.computations), sum(found.computations)
    if not 0.0 < least < default * (1.0 - noise):
        return 1.0
    return round(min(max((now - least) / (default - least), 0.0), _MOST_SLOWS), 3)


def _base(plan: str | Path | Plan | None, step: InterleavedStep, name: str) -> Plan:
    """The plan to which the settings are added. Its target names the variables and flags of this process."""
    plan = plan_files.load(plan) if isinstance(plan, str | Path) else plan
    if plan is None and isinstance(step.options.plan, Plan):
        plan = step.options.plan
    gpu, link = gpu_name(jax.devices()[0].device_kind), link_of(os.environ)
    here = target_of(gpu, link, gpus_per_node(jax.devices()) or len(jax.devices()), step.options.xla)
    if plan is None:
        return Plan(name, here)
    if plan.target.implementation != here.implementation:
        return plan  # its operators have the names of its implementation
    process = {"setting": here.setting, "environment": here.environment, "xla_flags": here.xla_flags}
    return replace(plan, target=replace(plan.target, **process))


def _space() -> Space:
    version = tuple(map(int, nccl_version().split(".")[:2]))
    return Space(CHANNELS, CHUNKS if version >= _CHUNKS_FROM else CHUNKS[-1:])
