"""Reports of what the pass manager did: frozen data with a JSON form and a table.

A `Report` holds one `StageReport` per stage. A `StageReport` holds one `PassReport` per pass. A `PassReport` holds the
notes of its pass. The JSON form is stored next to the compilation cache, because no pass runs when a program comes from
that cache (docs/design/compiler.md, "Names, markers, fingerprints").
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from dhelix.errors import DhelixError
from dhelix.passes.framework import headline
from dhelix.passes.framework.gain import Gain, StepParts

CHANGED = "changed"
UNCHANGED = "unchanged"
REFUSED = "refused"  # the pass raised PassRefusal
FAILED = "failed"  # the pass raised another error, or its output did not verify
DISABLED = "disabled"
NOT_RUN = "not run"

_OUTCOME_STYLES = {CHANGED: "green", REFUSED: "yellow", FAILED: "red"}

_LOG_WIDTH = 160  # width in characters of tables in files and job logs


@dataclass(frozen=True)
class Note:
    """A note on something that a pass did, or on something that it left unchanged.

    Attributes:
      message: one line of text.
      instruction: name of the instruction that the note is about, if there is one.
      facts: further data, as JSON values by name.
      source: where the instruction comes from in the user's program, such as "model.py:31 (forward)".
    """

    message: str
    instruction: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.instruction, self.source)))
        where = f" at {where}" if where else ""
        facts = ", ".join(f"{key}={value}" for key, value in self.facts.items())
        return f"{self.message}{where}" + (f" ({facts})" if facts else "")


@dataclass(frozen=True)
class PassReport:
    """The result of one pass over one module. `fingerprint` identifies the module's bytes after the pass."""

    number: int
    name: str
    stage: str
    outcome: str
    seconds: float = 0.0
    instructions_before: int = 0
    instructions_after: int = 0
    fingerprint: str = ""
    notes: tuple[Note, ...] = ()

    @property
    def changed(self) -> bool:
        return self.outcome == CHANGED

    @property
    def unchanged(self) -> bool:
        """Whether the pass ran and found nothing to do."""
        return self.outcome == UNCHANGED

    @property
    def ran(self) -> bool:
        return self.outcome not in (DISABLED, NOT_RUN)

    @property
    def instruction_difference(self) -> int:
        return self.instructions_after - self.instructions_before

    @property
    def summary(self) -> list[str]:
        """The notes as text without facts. Each distinct message appears once, with its count and up to two sources."""
        counts: dict[str, int] = {}
        sources: dict[str, dict[str, None]] = {}
        for note in self.notes:
            counts[note.message] = counts.get(note.message, 0) + int(note.facts.get("count", 1))
            sources.setdefault(note.message, {}).update({note.source: None} if note.source else {})
        return [_summary(message, count, [*sources[message]]) for message, count in counts.items()]


@dataclass(frozen=True)
class StageReport:
    """The reports of the passes of one stage.

    Attributes:
      seconds: time of the stage, including the time to read, verify and write the module.
      stored: whether the stage's result and this report come from an earlier process. If so, the stage's passes did
        not run in this process.
      parts: predicted times of the scheduled step; None if unknown.
    """

    stage: str
    module: str
    passes: tuple[PassReport, ...] = ()
    seconds: float = 0.0
    stored: bool = False
    parts: StepParts | None = None

    @property
    def changed(self) -> bool:
        return any(p.changed for p in self.passes)

    def together(self) -> tuple[PassReport, ...]:
        """The reports of the passes. If no pass ran, and all have the same notes, one entry stands for all passes."""
        if len(self.passes) < 2 or any(p.ran or p.notes != self.passes[0].notes for p in self.passes):
            return self.passes
        first, *others = self.passes
        return (dataclasses.replace(first, name=f"{first.name} and {len(others)} more"),)


@dataclass(frozen=True)
class Report:
    """The reports of all stages of one program.

    Attributes:
      fingerprint: fingerprint of the inputs (program, options, profile, versions). It is part of the module's name.
      collective_fingerprint: fingerprint of the compiled order of collectives; None if it was not computed.
      left_alone: why the plain step (without passes) runs; "" if the step with passes runs.
      gain: predicted gain over the plain step; None if the time of either step is not predicted.
      settings: what became of the plan's settings of collectives; "" if it has none.
      compile_seconds: time in this process from the lowered step to the callable step. It is 0 if dhelix did not
        compile the step itself, as with `lower(...).compile()`.
      plain_seconds: the part of `compile_seconds` in which this process computed the plain step's memory and time.
    """

    module: str
    fingerprint: str
    stages: tuple[StageReport, ...] = ()
    collective_fingerprint: str | None = None
    left_alone: str = ""
    gain: Gain | None = None
    settings: str = ""
    compile_seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def passes(self) -> tuple[PassReport, ...]:
        return tuple(p for stage in self.stages for p in stage.passes)

    @property
    def changed(self) -> bool:
        return any(p.changed for p in self.passes)

    def __getitem__(self, name: str) -> PassReport:
        """The report of the pass called `name`."""
        for entry in self.passes:
            if entry.name == name:
                return entry
        raise DhelixError(f"no pass {name!r} in this report; it has {', '.join(p.name for p in self.passes) or 'none'}")

    def __iter__(self) -> Iterator[PassReport]:
        return iter(self.passes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads the output of `to_json`. Raises DhelixError if `text` is no such output or is truncated."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DhelixError(f"not a dhelix report of this version ({error}): delete it and compile again") from None

    def table(self, verbose: bool = False) -> Table:
        """A table of the passes' results, in run order. `verbose` adds times, instruction counts and all facts."""
        table = Table(show_edge=False, pad_edge=False)
        for heading in ("pass", "result") if not verbose else ("pass", "stage", "ms", "instructions", "result"):
            table.add_column(heading, justify="right" if heading in ("ms", "instructions") else "left", no_wrap=True)
        table.add_column("notes", overflow="fold")
        for stage in self.stages:
            for entry in stage.passes if verbose else stage.together():
                table.add_row(*_cells(entry, stage.stored, verbose))
        return table

    def __str__(self) -> str:
        """The text that `print` writes, without colors, for logs."""
        text = io.StringIO()
        self.print(Console(file=text, width=_LOG_WIDTH, color_system=None, force_jupyter=False))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def print(self, console: Console | None = None, verbose: bool = False) -> None:
        """Prints the step's outcome and gain, then the result of each pass. `verbose` adds all details."""
        if console is None:
            console = Console()
            if not console.is_terminal:
                console = Console(width=_LOG_WIDTH)
        console.print(headline.text(self), markup=False, highlight=False, soft_wrap=True)
        console.print()
        if self.left_alone and self.changed:
            console.print("What was tried and dropped:", highlight=False)
        console.print(self.table(verbose))
        if not verbose:
            console.print("(print(verbose=True) adds times, instructions and all facts)", style="dim", highlight=False)
        else:
            console.print(
                f"fingerprint of the inputs of {self.module}: {self.fingerprint}", style="dim", highlight=False
            )


def _summary(message: str, count: int, sources: list[str]) -> str:
    times = f" ({count} x)" if count > 1 else ""
    more = ", ..." if len(sources) > 2 else ""
    return f"{message}{times}" + (f", at {', '.join(sources[:2])}{more}" if sources else "")


def _cells(entry: PassReport, stored: bool, verbose: bool) -> tuple[str, ...]:
    style = _OUTCOME_STYLES.get(entry.outcome)
    outcome = f"[{style}]{entry.outcome}[/]" if style else entry.outcome
    outcome += " (stored)" if stored and entry.ran else ""
    if not verbose:
        return entry.name, outcome, _escaped(entry.summary)
    counts = f"{entry.instructions_before} -> {entry.instructions_after}" if entry.ran else ""
    seconds = f"{entry.seconds * 1e3:.1f}" if entry.ran else ""
    return entry.name, entry.stage, seconds, counts, outcome, _escaped(map(str, entry.notes))


def _escaped(lines: Iterable[str]) -> str:
    return "\n".join(line.replace("[", r"\[") for line in lines)
