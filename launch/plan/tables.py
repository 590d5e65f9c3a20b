"""Output of `dhelix plan`: JSON for scripts, and tables for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dhelix.launch.inspect.reading.dumps import Memory
from dhelix.launch.plan.bounds import BodyBound
from dhelix.launch.plan.program import Program
from dhelix.launch.plan.search import Candidate, MemoryLimit, microseconds
from dhelix.launch.shown.progress import say
from dhelix.passes.communication import exchange
from dhelix.passes.framework.gain import Gain, guesses
from dhelix.passes.framework.units import bytes_text
from dhelix.passes.plans.plan import Plan, PlanBody, PlanSegment
from dhelix.profiles.hardware import LINKS, describe

_LONGEST = 3  # a row names at most this many operators that run beneath its collective


@dataclass(frozen=True)
class PlanView:
    """The result of one call of `dhelix plan`.

    Attributes:
      best: the chosen candidate.
      candidates: one candidate for each launch setting and form of the step (skew, and which collectives are replaced).
      gain: how much faster the best candidate is than the plain step under the same launch setting. For a dump, the
        comparison is with the dump's order.
      plain: the plain step; None for a dump, because a dump contains one program only.
      plain_seconds: predicted time of the plain step, by launch setting; None for a dump.
      memory: the memory that the planned step needs, by the compiler's count; None if a dump does not say it.
      limit: the memory limit.
      bounds: if requested, lower bounds on the times of the computations that the best candidate's plan orders.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    gain: Gain
    plain: Program | None
    plain_seconds: Mapping[str, float] | None
    memory: Memory | None
    limit: MemoryLimit
    bounds: tuple[BodyBound, ...] = ()

    @property
    def plain_memory(self) -> Memory | None:
        """The memory that the plain step needs, by the compiler's count; None if it is unknown."""
        return self.plain and self.plain.memory

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values. Memory is in bytes on one GPU.

        Times are in microseconds, of one execution in `collectives` and `bounds`, and of one step elsewhere. Only
        `solve_seconds`, the duration of the search, is in seconds.
        """
        plan, target = self.best.plan, self.best.plan.target
        return {
            "program": plan.program,
            "hardware": target.hardware,
            "link": target.link,
            "setting": target.setting,
            "environment": dict(target.environment),
            "xla_flags": list(target.xla_flags),
            "collective_implementation": target.implementation,
            "max_in_flight": plan.order.max_in_flight,
            **_structure(plan),
            **{name: round(value, 6) for name, value in dataclasses.asdict(plan.predicted).items()},
            "slow_down_us": round(1e6 * self.best.timeline.slow_down, 2),
            "exposed_us": round(1e6 * self.best.timeline.exposed, 2),
            "xla_order_us": round(1e6 * self.best.seconds_xla, 2),
            "plain_us": self._plain_us(self.best),
            "gain": {"ratio": round(self.gain.ratio, 6), **{k: microseconds(v) for k, v in self.gain.causes.items()}},
            "unknown_loops": list(self.best.step_time.unknown_loops),
            "collectives": self.best.collectives,
            "memory": {
                "plain": self.plain_memory and self.plain_memory.peak,
                "interleaved": self.memory and self.memory.peak,
                "limit": self.limit.bytes,
                "estimated_temporaries": self.best.bytes,
                "estimated_temporaries_xla_order": self.best.bytes_xla,
            },
            "solve_seconds": round(self.best.solve_seconds, 3),
            "bounds": [body.to_json() for body in self.bounds],
            "candidates": [self._candidate(c) for c in self.candidates],
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        predicted = candidate.plan.predicted
        return {
            "setting": candidate.plan.target.setting,
            **_structure(candidate.plan),
            "makespan_us": round(predicted.makespan_us, 2),
            "xla_order_us": round(1e6 * candidate.seconds_xla, 2),
            "plain_us": self._plain_us(candidate),
            "hidden_fraction": round(predicted.hidden_fraction, 6),
            "guessed_fraction": round(predicted.guessed_fraction, 6),
            "guessed_overlap_fraction": round(predicted.guessed_overlap_fraction, 6),
            "solve_seconds": round(candidate.solve_seconds, 3),
        }

    def _plain_us(self, candidate: Candidate) -> float | None:
        return None if self.plain_seconds is None else round(1e6 * self.plain_seconds[candidate.plan.target.setting], 2)


def print_view(view: PlanView, console: Console, top: int) -> None:
    """Prints all candidates, then the best candidate's collectives and the segments of its first body."""
    best = view.best
    target = best.plan.target
    say(console, f"{best.plan.program}; {target.hardware}, link {target.link}. Predicted, not run:")
    for line in _headline(view):
        say(console, f"  {line}")
    console.print(_settings(view))
    console.print(_collectives(view, top))
    for body in best.plan.bodies[:1]:
        console.print(segments(body))
    others = [f"{body.name} ({body.runs:,} x)" for body in best.plan.bodies[1:]]
    if others:
        say(console, f"The plan also orders: {'; '.join(others)}.")
    reduced = "Gradients are reduced layer by layer, during the last backward." if best.plan.collectives.reduced else ""
    for line in filter(None, (best.step_time.unknown_text, reduced, *_memory(view), _start(best))):
        say(console, line)


def _headline(view: PlanView) -> list[str]:
    gain, target = view.gain, view.best.plan.target
    plain = "the same micro-batched step without passes, under the same launch setting"
    against = "the order of the dump" if view.plain_seconds is None else plain
    flags = " (--inter_bandwidth, --gpus_per_node)" if gain.after.assumed else ""
    return [
        f"{target.setting}: {gain.time()}, compared with {against}",
        gain.why(),
        gain.left(),
        guesses(gain.after) + flags,
    ]


def _settings(view: PlanView) -> Table:
    """A table with a row for each candidate. The best candidate is the first row, in bold.

    A column of _STRUCTURE is left out if it would be empty in every row.
    """
    table = Table(title="One step under each launch setting", title_justify="left", title_style="bold")
    candidates = sorted(view.candidates, key=lambda candidate: (candidate is not view.best, candidate.rank()))
    structure = {name: of for name, of in _STRUCTURE.items() if any(map(of, (c.plan for c in candidates)))}
    table.add_column("launch setting", no_wrap=True)
    for name in structure:
        table.add_column(name, overflow="fold")
    of_program = "XLA's order" if view.plain_seconds is not None else "order of the dump"
    for column in ("planned", of_program, "plain", "hidden", "slow-down", "exposed", "guessed", "search"):
        table.add_column(column, justify="right", no_wrap=True)
    for candidate in candidates:
        target, predicted, timeline = candidate.plan.target, candidate.plan.predicted, candidate.timeline
        plain = None if view.plain_seconds is None else view.plain_seconds[target.setting]
        table.add_row(
            target.setting,
            *(str(of(candidate.plan) or "-") for of in structure.values()),
            _ms(candidate.seconds),
            _ms(candidate.seconds_xla),
            "-" if plain is None else _ms(plain),
            f"{predicted.hidden_fraction:.0%}",
            _ms(timeline.slow_down),
            _ms(timeline.exposed),
            f"{predicted.guessed_fraction:.1%} / {predicted.guessed_overlap_fraction:.0%}",
            f"{candidate.solve_seconds:.1f} s",
            style="bold" if candidate is view.best else "",
        )
    table.caption = (
        "The first row is chosen. hidden: fraction of communication under compute; slow-down: time that overlap costs "
        "compute; guessed: fraction of times alone / of overlap that is not measured; search: time to find the order"
    )
    if "by layer" in structure:
        table.caption += "; by layer: gradients are reduced layer by layer, chosen if 0.5 % faster"
    if "decomposed" in structure:
        table.caption += (
            "; decomposed: these collectives are replaced by other kinds; all-to-alls are chosen if 1 % faster"
        )
    table.caption_justify = "left"
    return table


_STRUCTURE: dict[str, Callable[[Plan], object]] = {
    "decomposed": lambda plan: exchange.in_words(plan.collectives.decomposed),
    "skew": lambda plan: plan.order.skew,
    "row parts": lambda plan: plan.collectives.row_parts,
    "by layer": lambda plan: "yes" if plan.collectives.reduced else "",
}


def _structure(plan: Plan) -> dict[str, Any]:
    """The form of the step that a plan is for, as JSON values."""
    instead = plan.collectives
    decomposed = list(map(str, instead.decomposed))
    return {
        "decomposed": decomposed, "skew": plan.order.skew, "row_parts": instead.row_parts, "reduced": instead.reduced,
    }  # fmt: skip


def _collectives(view: PlanView, top: int) -> Table:
    title = f"Collectives under launch setting {view.best.plan.target.setting}, one execution each"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("collective", "in"):
        table.add_column(column, overflow="fold", min_width=12)
    for column in ("runs", "size", "alone", "time", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("beneath it (µs)", overflow="fold")
    rows = view.best.collectives
    for row in rows[:top]:
        beneath = ", ".join(f"{b['name']}: {b['us']:,.0f}" for b in row["beneath"][:_LONGEST] if b["us"] >= 1)
        times = [f"{row[name]:,.0f} µs" for name in ("alone_us", "time_us", "exposed_us")]
        size = bytes_text(row["bytes"])
        where = row["body"].partition(":")[0]
        name = row["name"] if row["kind"] in row["name"] else f"{row['name']} ({row['kind']})"
        table.add_row(name, where, f"{row['runs']:,}", size, *times, beneath or "nothing")
    table.caption = (
        "alone: without overlap; time: from start to end in the plan; exposed: the part under no compute; beneath "
        "it: the operators that run meanwhile"
    )
    table.caption_justify = "left"
    if rows[top:]:
        table.caption += f"; and {len(rows) - top} more (--top)"
    return table


def segments(body: PlanBody) -> Table:
    """A table of a body's segments: their operators and predicted times, and measured times if the plan has them."""
    measured = any(segment.measured_us is not None for segment in body.segments)
    took = "" if body.measured_us is None else f", measured {body.measured_us:,.0f} µs"
    title = f"Operators that run together: {body.name}, {body.runs:,} runs, {body.predicted_us:,.0f} µs{took}"
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("strand alpha", overflow="fold")
    table.add_column("strand beta", overflow="fold")
    table.add_column("first")
    for column in ("predicted", "measured")[: 1 + measured]:
        table.add_column(column, justify="right", no_wrap=True)
    for number, segment in enumerate(body.segments, 1):
        alpha, beta = (_strand(segment, strand) for strand in ("alpha", "beta"))
        took = "-" if segment.measured_us is None else f"{segment.measured_us:,.0f} µs"
        times = (f"{segment.predicted_us:,.0f} µs", took)[: 1 + measured]
        table.add_row(str(number), alpha, beta, "".join(segment.run[:1]), *times)
    return table


def _strand(segment: PlanSegment, strand: str) -> str:
    """The operators of `strand` in a segment, as text. Operators without a strand count as alpha."""
    mine = [name for name in segment.run if name.startswith("beta ") == (strand == "beta")]
    return ", ".join(name.removeprefix(f"{strand} ") for name in mine)


def _memory(view: PlanView) -> list[str]:
    if view.memory is None:
        return [
            f"Memory: {bytes_text(view.best.bytes)} in addition to the arguments, estimated; the dump contains no more."
        ]
    line = f"Memory on a GPU: {bytes_text(view.memory.peak)}"
    if view.plain_memory is not None:
        more = round(100.0 * (view.memory.peak / view.plain_memory.peak - 1.0), 1)
        line += f", plain {bytes_text(view.plain_memory.peak)} ({f'{more:+.1f} %' if more else 'as much'})"
    if view.limit.bytes is None:
        return [f"{line}."]
    over = view.memory.peak > view.limit.bytes
    said = f"more than the limit of {bytes_text(view.limit.bytes)}" if over else f"limit {bytes_text(view.limit.bytes)}"
    return [f"{line}; {said}.", *_too_large(view.memory.peak, view.best.plan.target.hardware)]


def _too_large(needed: int, gpu: str) -> list[str]:
    size = int(describe(gpu, LINKS[0]).memory_bytes)
    less = "use more GPUs, fewer layers or shorter sequences"
    return [f"That is more than the {bytes_text(size)} of one {gpu}: {less}."] if needed > size else []


def _start(best: Candidate) -> str:
    target = best.plan.target
    parts = [f"{name}={value}" for name, value in target.environment]
    if target.xla_flags:
        parts.append(f"XLA_FLAGS='{' '.join(target.xla_flags)}'")
    if not parts:
        return "The process needs no special launch setting."
    return f"Start the process with {' '.join(parts)}: dhelix does not set these."


def _ms(seconds: float) -> str:
    return f"{round(1e3 * seconds, 1) + 0.0:,.1f} ms"  # + 0.0 turns -0.0 into 0.0
