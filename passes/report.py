"""What the pass manager did: frozen data with a JSON form and a table.

A `Report` holds one `StageReport` per stage, that one `PassReport` per pass, and that the pass's notes.
The JSON form is what survives a hit in the compilation cache, when no pass runs (design.md 3).
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from dhelix.errors import DhelixError

CHANGED = "changed"
UNCHANGED = "unchanged"
REFUSED = "refused"  # met something it does not understand
FAILED = "failed"  # raised an unexpected error, or its output did not verify
DISABLED = "disabled"
NOT_RUN = "not run"

_OUTCOME_STYLES = {CHANGED: "green", REFUSED: "yellow", FAILED: "red"}

_LOG_WIDTH = 160  # of tables in files and job logs, which have no width of their own


@dataclass(frozen=True)
class Note:
    """One thing a pass did or left alone. `facts` holds JSON values only."""

    message: str
    instruction: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f" at {self.instruction}" if self.instruction else ""
        facts = ", ".join(f"{key}={value}" for key, value in self.facts.items())
        return f"{self.message}{where}" + (f" ({facts})" if facts else "")


@dataclass(frozen=True)
class PassReport:
    """One pass over one module. `fingerprint` is that of the module's bytes after the pass."""

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
    def instruction_difference(self) -> int:
        return self.instructions_after - self.instructions_before


@dataclass(frozen=True)
class StageReport:
    """The passes of one stage. `seconds` counts reading, checking and writing the module too.

    `stored` says that the stage did not run in this process: the compiled program came out of the compilation
    cache, and this report from beside it.
    """

    stage: str
    module: str
    passes: tuple[PassReport, ...] = ()
    seconds: float = 0.0
    stored: bool = False

    @property
    def changed(self) -> bool:
        return any(p.changed for p in self.passes)


@dataclass(frozen=True)
class Report:
    """All stages of one program.

    `fingerprint` is that of the inputs (program, options, profile, versions): the marker in the module's
    name. `collective_fingerprint` is that of the compiled order of collectives, None where not computed.
    """

    module: str
    fingerprint: str
    stages: tuple[StageReport, ...] = ()
    collective_fingerprint: str | None = None

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
        """Reads what `to_json` wrote. Raises DhelixError when `text` is something else or cut short."""
        try:
            return _read(cls, json.loads(text), stages=_stage_from)
        except (ValueError, TypeError, RecursionError) as error:
            raise DhelixError(
                f"this is no dhelix report, or one of another version ({error}); delete it and compile again"
            ) from None

    def table(self) -> Table:
        title = f"{self.module}  {self.fingerprint}"
        table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
        for heading, justify in (("#", "right"), ("pass", "left"), ("stage", "left"), ("ms", "right")):
            table.add_column(heading, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
        table.add_column("instructions", justify="right", no_wrap=True)
        table.add_column("result")
        table.add_column("notes", overflow="fold")
        for stage in self.stages:
            for entry in stage.passes:
                table.add_row(*_cells(entry, stage.stored))
        return table

    def __str__(self) -> str:
        """The table, as `print` shows it in a log."""
        text = io.StringIO()
        Console(file=text, width=_LOG_WIDTH, color_system=None, force_jupyter=False).print(self.table())
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def print(self, console: Console | None = None) -> None:
        if console is None:
            console = Console()
            if not console.is_terminal:
                console = Console(width=_LOG_WIDTH)
        console.print(self.table())


def _cells(entry: PassReport, stored: bool) -> tuple[str, ...]:
    ran = entry.outcome not in (DISABLED, NOT_RUN)
    counts = f"{entry.instructions_before} -> {entry.instructions_after}" if ran else ""
    style = _OUTCOME_STYLES.get(entry.outcome)
    outcome = f"[{style}]{entry.outcome}[/]" if style else entry.outcome
    return (
        str(entry.number),
        entry.name,
        entry.stage,
        f"{entry.seconds * 1e3:.1f}" if ran else "",
        counts,
        outcome + (" (stored)" if stored and ran else ""),
        "\n".join(str(note).replace("[", r"\[") for note in entry.notes),
    )


def _stage_from(data: Any) -> StageReport:
    return _read(StageReport, data, passes=_pass_from)


def _pass_from(data: Any) -> PassReport:
    return _read(PassReport, data, notes=lambda note: _read(Note, note))


_JSON_TYPES: dict[Any, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "Mapping[str, Any]": (dict,),
}


def _read[T](kind: type[T], data: Any, **parts: Callable[[Any], Any]) -> T:
    """An object of a dataclass out of its JSON form; `parts` read the entries of its lists.

    Raises TypeError for anything else: the file lies in a folder that others write to.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{type(data).__name__} in place of a {kind.__name__}")
    types = {field.name: field.type for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    values = dict(data)
    for name, value in data.items():
        if not isinstance(value, (list,) if name in parts else _JSON_TYPES[types[name]] if name in types else ()):
            raise TypeError(f"{kind.__name__}.{name} is {type(value).__name__}")
        if name in parts:
            values[name] = tuple(map(parts[name], value))
    return kind(**values)
