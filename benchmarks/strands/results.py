"""Results of `strands/run.py`: the JSON files, and quantities computed from several results.

A file holds the results of one call. Results of several files are compared only if workload, machine and link agree.
Times of different machines are not compared, because machines of the same kind differ in speed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dhelix.benchmarks.strands.variants import BOUND, OURS, SETTINGS, VARIANTS, XLA, either
from dhelix.errors import DhelixError

Workload = tuple[tuple[str, Any], ...]


@dataclass
class Result:
    """One program under one setting. Times in milliseconds, memory in GiB on one GPU.

    Attributes:
      steps_ms: every timed step.
      losses, grad_norms: results of the first steps. All programs start from the same state, with the same batches.
      dropped: with experts, the share of tokens' choices that were dropped in each of the first steps.
      peak_gib, temp_gib: XLA's peak memory, and its temporaries without arguments and results.
      compile_s, passes_s: seconds of the compilation with passes, and of dhelix's passes alone.
      passes: outcome of each dhelix pass, by its name.
      predicted_ms: the evaluator's time for the compiled program; None without costs.
      span_ms: length of one traced step on GPU 0; None without a trace. The next five describe this step.
      busy_ms: time in which anything runs.
      compute_ms: time in which anything other than communication runs.
      communication_ms: time in which communication runs, as kernels or on copy engines.
      hidden_ms: time in which communication and compute run at once.
      copies_ms: time in which copies run that are not communication.
      failed: why there are no times.
      mhz, watts: clock of the SMs and power of GPU 0 in each timed step.
      joules: energy of GPU 0 for a step, the mean of each turn.
    """

    setting: str
    variant: str
    steps_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    temp_gib: float = 0.0
    compile_s: float = 0.0
    passes_s: float = 0.0
    passes: dict[str, str] = field(default_factory=dict)
    predicted_ms: float | None = None
    span_ms: float | None = None
    busy_ms: float = 0.0
    compute_ms: float = 0.0
    communication_ms: float = 0.0
    hidden_ms: float = 0.0
    copies_ms: float = 0.0
    failed: str = ""
    mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return VARIANTS[self.variant].kind

    @property
    def median_ms(self) -> float:
        return statistics.median(self.steps_ms)

    @property
    def under_compute(self) -> float | None:
        """Fraction of the communication time that overlaps with compute; 1 without communication, None untraced."""
        if self.span_ms is None:
            return None
        return self.hidden_ms / self.communication_ms if self.communication_ms else 1.0

    @property
    def idle_ms(self) -> float:
        """Time of the traced step in which no compute runs."""
        return (self.span_ms or 0.0) - self.compute_ms


@dataclass
class Run:
    """One call of `strands/run.py`.

    Attributes:
      on: versions, GPUs, machine.
      workload: defines a step: preset, layers, seq, vocab, tp, microbatches, unrolled and more.
      tokens, flops: of one step on all GPUs. FLOPs of attention are not halved for causality.
      gpus: number of GPUs.
      peak_flops: dense bf16 FLOP/s of one GPU; 0 if the GPU has no description.
      dropped: what was not run, and why.
    """

    on: dict[str, Any]
    workload: dict[str, Any]
    tokens: int
    flops: float
    gpus: int
    peak_flops: float
    results: list[Result]
    dropped: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Writes the file atomically."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        temporary.replace(path)


def read(path: Path) -> Run:
    """Reads a file of `strands/run.py`. Leaves out programs that are no longer built, and lists them in `dropped`.

    Raises:
      DhelixError: the file has another content.
    """
    try:
        record = json.loads(path.read_text())
        record["results"] = [Result(**result) for result in record["results"]]
        run = Run(**record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DhelixError(f"{path} holds no results of benchmarks/strands/run.py ({error}); leave it out") from None
    known = [r for r in run.results if r.variant in VARIANTS and r.setting in SETTINGS]
    gone = [f"{r.setting} / {r.variant}: no longer built" for r in run.results if r not in known]
    return dataclasses.replace(run, results=known, dropped=[*run.dropped, *gone])


@dataclass(frozen=True)
class Group:
    """Comparable results: one workload on one machine over one link."""

    run: Run
    link: str
    results: tuple[Result, ...]

    def find(self, setting: str, variant: str) -> Result | None:
        """The variant's result with CUDA graphs, or without them if only that was run."""
        found = {r.variant: r for r in self.results if r.setting == setting}
        return next((found[name] for name in either(variant) if name in found), None)

    def plain(self, result: Result) -> Result | None:
        """The plain program whose memory and losses `result` is compared with; under the same setting, if possible."""
        others = (self.find(r.setting, "plain") for r in self.results)
        return self.find(result.setting, "plain") or next(filter(None, others), None)

    def best(self, kind: str) -> Result | None:
        """The fastest program of a kind: XLA, OURS or BOUND."""
        return min((r for r in self.results if r.kind == kind), key=lambda r: r.median_ms, default=None)

    @property
    def xla(self) -> Result | None:
        """XLA's best: the fastest program without dhelix, over all settings and options."""
        return self.best(XLA)

    @property
    def bound(self) -> Result | None:
        """The fastest program without communication, plain or strands."""
        return self.best(BOUND)

    @property
    def communication_cost(self) -> float | None:
        """XLA's best minus the bound, in milliseconds; None if unknown or not positive."""
        if self.xla is None or self.bound is None or self.bound.median_ms >= self.xla.median_ms:
            return None
        return self.xla.median_ms - self.bound.median_ms

    def speed_up(self, result: Result) -> float | None:
        """Time of XLA's best over the time of `result`."""
        return self.xla.median_ms / result.median_ms if self.xla else None

    def net_hidden(self, result: Result) -> float | None:
        """(XLA's best - result) / communication cost: the fraction of the communication cost that is removed."""
        if self.xla is None or self.communication_cost is None or result.kind == BOUND:
            return None
        return (self.xla.median_ms - result.median_ms) / self.communication_cost

    @property
    def traced_cost(self) -> float | None:
        """`communication_cost`, computed from the traced steps."""
        if self.xla is None or self.bound is None or self.xla.span_ms is None or self.bound.span_ms is None:
            return None
        cost = self.xla.span_ms - self.bound.span_ms
        return cost if cost > 0 else None

    def traced_hidden(self, result: Result) -> float | None:
        """`net_hidden`, computed from the traced steps."""
        if self.xla is None or self.xla.span_ms is None or self.traced_cost is None or result.span_ms is None:
            return None
        return None if result.kind == BOUND else (self.xla.span_ms - result.span_ms) / self.traced_cost

    def slow_down(self, result: Result) -> float | None:
        """How much longer compute takes next to communication, as a fraction of `traced_cost`.

        Compares the traced compute time with that of the same structure without communication.
        """
        cost, alone = self.traced_cost, self.alone(result)
        if cost is None or alone is None or alone.span_ms is None or result.span_ms is None or result.kind == BOUND:
            return None
        return (result.compute_ms - alone.compute_ms) / cost

    def alone(self, result: Result) -> Result | None:
        """The same structure without communication, under the same setting if possible."""
        structure = VARIANTS[result.variant].structure
        bounds = [r for r in self.results if r.kind == BOUND and VARIANTS[r.variant].structure == structure]
        return next((r for r in bounds if r.setting == result.setting), None) or next(iter(bounds), None)

    def launch_interval(self, result: Result) -> float | None:
        """The remaining fraction of `traced_cost`: compute waits for exposed communication, or kernels pause."""
        hidden, slower = self.traced_hidden(result), self.slow_down(result)
        return None if hidden is None or slower is None else 1.0 - hidden - slower

    def tokens_per_second(self, result: Result) -> float:
        return self.run.tokens / (result.median_ms * 1e-3)

    def mfu(self, result: Result) -> float | None:
        """Model FLOPs utilization; attention is not halved for causality. None without `peak_flops`."""
        if not self.run.peak_flops:
            return None
        return self.run.flops / (result.median_ms * 1e-3 * self.run.gpus * self.run.peak_flops)

    def loss_difference(self, result: Result) -> float | None:
        """The largest relative difference from the plain program's losses."""
        plain = self.plain(result)
        return None if plain is None or result.kind == BOUND else largest_difference(plain.losses, result.losses)


def largest_difference(expected: Sequence[float], actual: Sequence[float]) -> float | None:
    """The largest relative difference of values at the same index. Infinite if one is not finite; None if empty."""
    pairs = list(zip(expected, actual, strict=False))
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    return max((abs(a - b) / abs(a) for a, b in pairs), default=None)


def groups(runs: Iterable[Run]) -> list[Group]:
    """Comparable results, in the order of the files. If several files hold a program, the last one counts."""
    found: dict[tuple[Any, ...], tuple[Run, dict[tuple[str, str], Result]]] = {}
    for run in runs:
        for result in run.results:
            if result.failed or not result.steps_ms:
                continue
            link = SETTINGS[result.setting].link
            key = (tuple(sorted(run.workload.items())), run.on.get("machine", ""), link)
            _, results = found.setdefault(key, (run, {}))
            results[result.setting, result.variant] = result
    return [Group(run, key[-1], _ordered(results.values())) for key, (run, results) in found.items()]


def _ordered(results: Iterable[Result]) -> tuple[Result, ...]:
    settings, variants = list(SETTINGS), list(VARIANTS)
    return tuple(sorted(results, key=lambda r: (settings.index(r.setting), variants.index(r.variant))))


@dataclass(frozen=True)
class Cause:
    """The time that one change saves: `before` is the program without it, `after` the one with it."""

    name: str
    before: str
    after: str
    saved_ms: float


def causes(group: Group) -> list[Cause]:
    """Splits the gain over the plain program into causes, one after the other. Leaves out causes that were not run.

    A cause allows certain programs, and all programs of the causes before it. Its time is that of the fastest one.
    """
    ours = [r for r in group.results if VARIANTS[r.variant].structure == "strands" and r.kind == OURS]
    whole = [r for r in ours if not VARIANTS[r.variant].decomposed]
    bare = [r for r in whole if not VARIANTS[r.variant].own_options]
    in_xlas_order = [r for r in bare if VARIANTS[r.variant].order == "xla"]
    start = _start(group, in_xlas_order)
    if start is None:
        return []
    here = [r for r in whole if r.setting == start.setting]
    steps: Sequence[tuple[str, list[Result]]] = (
        (_STRANDS, [r for r in in_xlas_order if r in here]),
        (_ORDER, [r for r in bare if r in here]),
        ("XLA's options", here),
        ("launch settings", [r for r in whole if not SETTINGS[r.setting].copy_engines]),
        ("copy engines", whole),
        ("collectives decomposed", ours),
    )
    found, before = [], start
    for name, candidates in steps:
        if found:
            candidates = [before, *candidates]  # so a row is never slower than the previous one
        after = min(candidates, key=lambda r: r.median_ms, default=before)
        if after is not before:
            label = name if found else _first(name, after)
            found.append(Cause(label, _name(before), _name(after), before.median_ms - after.median_ms))
            before = after
    return _split_copies(group, start.setting, found)


_STRANDS, _ORDER = "strands", "order"


def _start(group: Group, in_xlas_order: Sequence[Result]) -> Result | None:
    """The plain program, if possible under a setting in which strands also ran in XLA's order."""
    plain = [r for r in group.results if r.variant in either("plain")]
    settings = {r.setting for r in in_xlas_order}
    return next((r for r in plain if r.setting in settings), None) or next(iter(plain), None)


def _first(name: str, after: Result) -> str:
    """The name of the first row. It lists all causes that the row contains if programs between them were not run."""
    held = [_STRANDS] + [_ORDER] * (VARIANTS[after.variant].order != "xla") + [name]
    return ", ".join(dict.fromkeys(held))


def _split_copies(group: Group, setting: str, found: list[Cause]) -> list[Cause]:
    """Splits the row "strands" into saved copies, which save time even without communication, and overlap."""
    plain, strands = (group.find(setting, f"{name}, no communication") for name in ("plain", "strands"))
    if not found or found[0].name != _STRANDS or plain is None or strands is None:
        return found
    saved = plain.median_ms - strands.median_ms
    copies = Cause("copies saved", _name(plain), _name(strands), saved)
    rest = dataclasses.replace(found[0], name="overlap, XLA's order", saved_ms=found[0].saved_ms - saved)
    return [copies, rest, *found[1:]]


def _name(result: Result) -> str:
    return f"{result.variant} ({result.setting})"
