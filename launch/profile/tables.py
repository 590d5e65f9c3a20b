"""Shows what a profile says about one step: rows of numbers, and the tables and JSON that contain them.

    estimator = Estimator(profile, hardware, "default")
    view = step_view(estimator, step_time.predict(module, Costs(hardware, estimator)))      # data
    print_view(view, console, top=12)                                                       # tables
    json.dumps(view.to_json())

Times are in seconds in rows and in JSON. Tables choose a unit for each time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dhelix.launch.shown.units import time_text
from dhelix.passes.evaluation.step_time import OperatorTime, StepTime
from dhelix.passes.framework.units import bytes_text
from dhelix.profiles.estimates import roofline
from dhelix.profiles.estimates.estimator import Estimate, Estimator, Source
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import Section

ORDER_MATTERS = 0.1  # a launch order is better if its OEF (overlap effectiveness) is higher by this or more

_SOURCES = {Source.MEASURED: "measured", Source.INTERPOLATED: "interpolated", Source.GUESS: "guessed"}
_LINKS = {"nvlink": "NVLink", "no-p2p": "no peer-to-peer (host memory)", "two-nodes": "two nodes over sockets"}
_NAMED = ("fusion", "other", "copy")  # kinds of operators whose family begins with the operation's name
_KINDS = {"grouped-gemm": "grouped GEMM", "attention-backward": "attention backward"}


@dataclass(frozen=True)
class Row:
    """One operator or collective of the step.

    Attributes:
      calls: number of executions per step on one GPU.
      alone: time of one execution while nothing else runs.
      share: time of all its executions, as a fraction of the sum over all operators and collectives of the step.
    """

    key: Key
    calls: int
    alone: Estimate
    share: float

    @property
    def source(self) -> str:
        return _SOURCES[self.alone.source]

    @property
    def bus_bandwidth(self) -> float | None:
        """Bus bandwidth of a collective in bytes per second; None for an operator, or if the time is 0."""
        if not isinstance(self.key, CollectiveKey) or not self.alone.seconds:
            return None
        return bus_bandwidth(self.key, self.alone.seconds)

    def to_json(self) -> dict[str, Any]:
        alone = {"seconds": self.alone.seconds, "spread": self.alone.spread, "source": self.source}
        entry = {"key": str(self.key), "calls": self.calls, **alone, "share": self.share}
        bandwidth = self.bus_bandwidth
        return entry if bandwidth is None else {**entry, "bus_bytes_per_second": bandwidth}


@dataclass(frozen=True)
class Together:
    """A measured pair in one launch order.

    Attributes:
      oef: overlap effectiveness (`PairTiming.oef`).
      one, other: slow-down of each side: its time in the pair, divided by its time alone.
      steady: whether the repeated measurements agree (`PairTiming.steady`).
      noise: whether the OEF is above 1 because of noise (`Section.noisy`).
    """

    oef: float
    one: float
    other: float
    steady: bool = True
    noise: bool = False

    @property
    def shown(self) -> float:
        """The OEF to show: at most 1 if a higher value is noise."""
        return min(self.oef, 1.0) if self.noise else self.oef


@dataclass(frozen=True)
class PairRow:
    """A pair of operators in both launch orders; an order that was not measured is None.

    In a pair of an operator and a collective, `other` is the collective.
    """

    one: Key
    other: Key
    one_first: Together | None
    other_first: Together | None

    @property
    def best(self) -> float:
        """The OEF of the launch order with the higher OEF."""
        return max(order.shown for order in (self.one_first, self.other_first) if order)

    @property
    def order_effect(self) -> float | None:
        """The OEF of `one_first` minus the OEF of `other_first`; None unless both are measured and steady."""
        if self.one_first is None or self.other_first is None:
            return None
        if not (self.one_first.steady and self.other_first.steady):
            return None
        return self.one_first.shown - self.other_first.shown

    def to_json(self) -> dict[str, Any]:
        def order(order: Together | None) -> dict[str, float | bool] | None:
            if order is None:
                return None
            slow_downs = {"slow_down_one": order.one, "slow_down_other": order.other}
            return {"oef": order.oef, **slow_downs, "steady": order.steady, "noise": order.noise}

        orders = {"one_first": order(self.one_first), "other_first": order(self.other_first)}
        return {"one": str(self.one), "other": str(self.other), **orders}


@dataclass(frozen=True)
class StepView:
    """What is known about one step under one launch setting.

    Attributes:
      time: times of the step's operators and collectives, without overlap.
      operators, collectives: rows of the step's operators and collectives, longest total time first.
      pairs: measured pairs, sorted by OEF, highest first.
      failures: why keys, pairs and instructions of the step could not be measured, by their text.
    """

    setting: str
    time: StepTime
    operators: tuple[Row, ...]
    collectives: tuple[Row, ...]
    pairs: tuple[PairRow, ...]
    failures: Mapping[str, str]

    @property
    def coverage(self) -> dict[str, float]:
        """For each source (measured, interpolated, guessed), its fraction of the step's time without overlap."""
        return {_SOURCES[source]: share for source, share in self.time.shares.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds_without_overlap": self.time.seconds,
            "gap_seconds": self.time.gap_seconds,
            "coverage": self.coverage,
            "operators": [row.to_json() for row in self.operators],
            "collectives": [row.to_json() for row in self.collectives],
            "pairs": [row.to_json() for row in self.pairs],
            "failures": dict(self.failures),
            "unknown_loops": list(self.time.unknown_loops),
        }


def step_view(estimator: Estimator, time: StepTime, refused: Mapping[str, str] | None = None) -> StepView:
    """What is known about a step under the launch setting of `estimator`.

    Args:
      time: times of the step's operators, predicted with the same estimator.
      refused: for each instruction that cannot run alone, the reason, by the instruction's name.
    """
    section = estimator.section
    rows = [Row(o.key, o.count, _alone(o, estimator), o.total / (time.busy or 1.0)) for o in time.operators]
    names = {str(row.key) for row in rows}
    failures = {text: why for text, why in section.failures.items() if names.issuperset(text.split(" + "))}
    return StepView(
        section.setting,
        time,
        tuple(row for row in rows if isinstance(row.key, OperatorKey)),
        tuple(row for row in rows if isinstance(row.key, CollectiveKey)),
        pair_rows(section, [row.key for row in rows]),
        dict(sorted({**failures, **(refused or {})}.items())),
    )


def _alone(operator: OperatorTime, estimator: Estimator) -> Estimate:
    """The time of an operator alone.

    If the estimator can only guess, the result is the time in `operator`. This time is based on the instruction, not
    only on the key. For example, only the instruction tells that a copy goes to the host's memory.
    """
    known = estimator.solo(operator.key)
    return Estimate(operator.seconds, known.source, operator.seconds) if known.source is Source.GUESS else known


def pair_rows(section: Section, wanted: Iterable[Key]) -> tuple[PairRow, ...]:
    """The measured pairs with both sides in `wanted`, highest OEF first. A row shows both launch orders."""
    wanted = set(wanted)
    sides = {
        tuple(sorted((pair.first, pair.second), key=_compute_first))
        for pair in section.pairs
        if pair.first in wanted and pair.second in wanted
    }
    rows = [
        PairRow(one, other, together(section, one, other), together(section, other, one, swapped=True))
        for one, other in sides
    ]
    return tuple(sorted(rows, key=lambda row: (-row.best, str(row.one), str(row.other))))


def together(section: Section, first: Key, second: Key, swapped: bool = False) -> Together | None:
    """The pair with `first` launched first; None if this order was not measured.

    If `swapped`, the result's `one` is the slow-down of `second`, and `other` is the slow-down of `first`.
    """
    pair = PairKey(first, second)
    timing = section.pairs.get(pair)
    if timing is None:
        return None
    slow_downs = timing.first / timing.first_alone, timing.second / timing.second_alone
    one, other = reversed(slow_downs) if swapped else slow_downs
    return Together(timing.oef, one, other, timing.steady, section.noisy(pair))


def bus_bandwidth(key: CollectiveKey, seconds: float) -> float:
    """Bus bandwidth (NCCL's busbw), bytes per second sent by a GPU: comparable between kinds and group sizes."""
    return roofline.wire_bytes(key.kind, key.bytes, key.group_size) / seconds


def _compute_first(key: Key) -> tuple[bool, str]:
    return isinstance(key, CollectiveKey), str(key)


# ---- words


def readable(key: Key, among: Iterable[Key] = ()) -> str:
    """A key in a few words. If another operator in `among` has the same words, the key's family is added."""
    words = _short(key)
    if isinstance(key, OperatorKey) and any(other != key and _short(other) == words for other in among):
        return f"{words} [{key.family.partition(':')[2] if key.kind in _NAMED else key.family}]"
    return words


def _short(key: Key) -> str:
    if isinstance(key, CollectiveKey):
        where = f"{key.gpus_per_node} GPUs" + (f" x {key.nodes} nodes" if key.nodes > 1 else "")
        groups = f", {key.groups} groups" if key.groups > 1 else ""
        how = "" if key.implementation == "nccl" else f", {key.implementation}"
        return f"{key.kind} {bytes_text(key.bytes)}, {where}{groups}{how}"
    if key.kind == "copy" and key.family == "contiguous" and key.sizes:
        return f"copy {bytes_text(key.sizes[0])}"
    sizes = "x".join(map(str, key.sizes))
    parts = key.family.split(":")
    if key.kind == "gemm":  # types:layout:library:epilogue
        library = [part for part in parts[2:3] if part != "cublaslt"]
        return " ".join(["GEMM", *parts[1:2], sizes, *library, *parts[3:]])
    named = parts[0] if key.kind in _NAMED else ""
    return " ".join(filter(None, (_KINDS.get(key.kind, key.kind), named, sizes)))


def setup(gpu: str, link: str, gpus: int) -> str:
    """The GPUs of a measurement in words, such as `4 x H200, NVLink`."""
    return f"{f'{gpus} x ' if gpus else ''}{gpu}, {_LINKS.get(link, link)}"


def launch_order_text(pairs: Sequence[PairRow]) -> str:
    """A sentence about the effect of the launch order on pairs of an operator and a collective."""
    mixed = [p for p in pairs if isinstance(p.one, OperatorKey) and isinstance(p.other, CollectiveKey)]
    effects = [p.order_effect for p in mixed if p.order_effect is not None]
    if not effects:
        return "Launch order: no pair of compute and communication is measured well in both orders."
    compute = sum(effect >= ORDER_MATTERS for effect in effects)
    collective = sum(effect <= -ORDER_MATTERS for effect in effects)
    return (
        f"Launch order: of {len(effects)} pairs of compute and communication, {compute} overlap better with compute"
        f" launched first, {collective} with the collective first (OEF differs by {ORDER_MATTERS} or more);"
        f" the better order is worth {statistics.median(map(abs, effects)):.2f} OEF in the median."
    )


def coverage_text(view: StepView) -> str:
    shares = ", ".join(f"{share:.1%} {source}" for source, share in view.coverage.items())
    time = f"{time_text(view.time.busy)} of operators and collectives, each alone"
    text = f"Setting {view.setting}: the step runs {time}; {shares}."
    return f"{text} {view.time.unknown_text}".rstrip()


# ---- tables


def print_view(view: StepView, console: Console, top: int, operators: bool = True) -> None:
    """Prints the coverage, then tables of operators, collectives, pairs and failures. Empty tables are left out.

    Args:
      top: largest number of rows in a table.
      operators: whether to print the table of operators.
    """
    _say(console, coverage_text(view), style="bold")
    for name, rows in (("Operators", view.operators if operators else ()), ("Collectives", view.collectives)):
        if rows:
            console.print(_solo_table(name, rows, top))
    if view.pairs:
        half = max(1, top // 2)
        console.print(_pair_table("Pairs that overlap best", view.pairs[:half]))
        if worst := view.pairs[half:][-half:]:
            console.print(_pair_table("Pairs that overlap worst", worst[::-1]))
        _say(console, launch_order_text(view.pairs))
    if view.failures:
        console.print(_failures_table(view.failures, top))


def print_collectives(section: Section, console: Console) -> None:
    """Prints tables of the bus bandwidths (NCCL's busbw) of the measured collectives, by kind and size."""
    meshes = sorted({(k.gpus_per_node, k.nodes, k.groups, k.implementation) for k in section.collectives})
    if not meshes:
        _say(console, f"No collective is measured under {section.setting}.")
    for mesh in meshes:
        keys = [k for k in section.collectives if (k.gpus_per_node, k.nodes, k.groups, k.implementation) == mesh]
        kinds = sorted({key.kind for key in keys})
        per_node, nodes, groups, implementation = mesh
        at_once = f"{groups} groups at once" if groups > 1 else "one group alone"
        where = f"{per_node} GPUs on {nodes} nodes" if nodes > 1 else f"{per_node} GPUs"
        title = f"GB/s of collectives of {where}, {at_once}, {implementation}, setting {section.setting}"
        table = _table(title, [], ["bytes", *kinds])
        for size in sorted({key.bytes for key in keys}):
            row = [next((key for key in keys if (key.kind, key.bytes) == (kind, size)), None) for kind in kinds]
            cells = (_gigabytes_per_second(k, section.collectives[k].seconds) if k else "-" for k in row)
            table.add_row(bytes_text(size), *cells)
        console.print(table)


def _gigabytes_per_second(key: CollectiveKey, seconds: float) -> str:
    return f"{bus_bandwidth(key, seconds) / 1e9:,.1f}"


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in words:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _solo_table(name: str, rows: Sequence[Row], top: int) -> Table:
    bandwidth = any(row.bus_bandwidth is not None for row in rows)
    numbers = ["calls", "alone", "spread", *(["GB/s"] if bandwidth else []), "share", "source"]
    table = _table(f"{name} of the step, most time first", [name.lower()[:-1]], numbers)
    keys = [row.key for row in rows]
    for row in rows[:top]:
        speed = [f"{(row.bus_bandwidth or 0) / 1e9:,.1f}"] if bandwidth else []
        spread = f"{row.alone.spread / row.alone.seconds:.1%}" if row.source == "measured" else "-"
        cells = (f"{row.calls:,}", time_text(row.alone.seconds), spread, *speed, f"{row.share:.1%}", row.source)
        table.add_row(Text(readable(row.key, keys)), *cells)
    if left := rows[top:]:
        table.caption = f"and {len(left)} more, {sum(row.share for row in left):.1%} of the time (show more with --top)"
    return table


def _pair_table(title: str, rows: Sequence[PairRow]) -> Table:
    """A table with OEF and slow-downs in each launch order.

    `?` marks an OEF whose repeats scatter. `~1` marks an OEF that is above 1 because of noise.
    """
    numbers = ["OEF, 1 first", "slow-down 1 / 2", "OEF, 2 first", "slow-down 1 / 2"]
    table = _table(title, ["1", "2"], numbers)
    keys = [key for row in rows for key in (row.one, row.other)]
    orders = [order for row in rows for order in (row.one_first, row.other_first) if order]
    if any(order.noise for order in orders):
        table.caption = "~1: above 1, not confirmed by a second measurement, so noise"
        table.caption_justify = "left"
    for row in rows:
        cells = []
        for order in (row.one_first, row.other_first):
            cells += [_oef_text(order), f"{order.one:.2f} / {order.other:.2f}"] if order else ["-", "-"]
        table.add_row(Text(readable(row.one, keys)), Text(readable(row.other, keys)), *cells)
    return table


def _oef_text(order: Together) -> str:
    number = "~1" if order.noise else f"{order.oef:.2f}"
    return f"{number}{'' if order.steady else ' ?'}"


def _failures_table(failures: Mapping[str, str], top: int) -> Table:
    table = _table("Not measured", ["what", "why"], [])
    for what in sorted(failures)[:top]:
        table.add_row(Text(what), Text(failures[what]))
    if len(failures) > top:
        table.caption = f"and {len(failures) - top} more (--top)"
    return table
