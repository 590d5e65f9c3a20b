"""Results of `benchmarks/trainers/run.py`, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dhelix.benchmarks.pages import markdown


@dataclass(frozen=True)
class Run:
    """One run of a trainer.

    Attributes:
      losses: the loss of each step, in all digits.
      first: seconds until the first loss, with the import of libraries and all compilation.
      compiled: seconds that XLA compiled the step.
      seconds: seconds of the whole run.
    """

    losses: tuple[float, ...]
    first: float
    compiled: float
    seconds: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        return cls(**{**row, "losses": tuple(row["losses"])})


@dataclass(frozen=True)
class Program:
    """What `dhelix run` did with one program; see `runtime/undecorated/seen.py`."""

    name: str
    outcome: str
    why: tuple[str, ...]
    seconds: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        return cls(row["name"], row["outcome"], tuple(row["why"]), round(row["seconds"], 1))


@dataclass(frozen=True)
class Result:
    """A trainer on a mesh, plain and under `dhelix run`.

    Attributes:
      exact: if losses differ, both runs without what rounds differently: passes of XLA that depend on the whole
        program, and `replica-sums`, which adds over devices after all micro-batches.
    """

    name: str
    mesh: str
    versions: Mapping[str, str]
    plain: Run
    dhelix: Run
    programs: tuple[Program, ...]
    exact: tuple[Run, ...] = ()

    @property
    def equal_exactly(self) -> bool:
        """Whether all losses are equal in all digits without those passes."""
        return len({one.losses for one in self.exact}) == 1

    @property
    def equal(self) -> bool:
        """Whether all losses are equal in all digits."""
        return self.plain.losses == self.dhelix.losses

    @property
    def difference(self) -> float:
        """The largest difference of a loss, relative to the loss."""
        pairs = zip(self.plain.losses, self.dhelix.losses, strict=True)
        return max(abs(one - other) / abs(one) for one, other in pairs)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        programs = tuple(map(Program.of, row["programs"]))
        runs = Run.of(row["plain"]), Run.of(row["dhelix"])
        return cls(row["name"], row["mesh"], row["versions"], *runs, programs, tuple(map(Run.of, row["exact"])))


def table(results: Sequence[Result]) -> str:
    """A row for each trainer."""
    heads = ("trainer", "mesh", "last loss", "losses", "step", "first loss after, s", "of it XLA, s", "with", "jax")
    return markdown.table(heads, [_row(one) for one in results])


def _row(one: Result) -> tuple[str, ...]:
    same = "equal in all digits"
    if not one.equal:
        exactly = "equal in all digits" if one.equal_exactly else "different, too,"
        same = f"differ by up to {one.difference:.1g}; {exactly} without the passes that round"
    steps = dict.fromkeys(f"{p.name}: {p.why[0].partition(': ')[2] or p.why[0]}" for p in one.programs)
    own = [f"{name} {version}" for name, version in one.versions.items() if name not in ("jax", "jaxlib")]
    return (
        one.name,
        one.mesh,
        f"{one.dhelix.losses[-1]:.7g}",
        same,
        "; ".join(steps) or "nothing was looked at",
        f"{one.plain.first:.0f} -> {one.dhelix.first:.0f}",
        f"{one.plain.compiled:.0f} -> {one.dhelix.compiled:.0f}",
        ", ".join(own),
        one.versions["jax"],
    )
