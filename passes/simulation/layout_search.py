"""Searches the fastest choice that fits into memory, with few simulations.

    found = search(choices, estimator, simulate, limit=80e9, simulations=40)
    found.ranked[0].choice, found.ranked[0].step.seconds
    found.reasons["tp"]["8"]        # the best with tp 8, and how much longer it takes

1. Each choice is estimated (`estimates.py`).
2. The first simulations cover all values of each trait that may win: for each value, the choice with the best estimate.
3. Then estimates are corrected. The logarithm of an error is the sum of one error for each trait, fitted to all
   simulated steps by least squares. It is fitted for time and for memory.
4. The choices that are then expected to be the fastest are simulated, some at once, and step 3 follows again. Those
   that are expected to be slower than the best one by more than MARGIN are not.
5. Then follows, for each value of each trait, the choice that is expected to be the best with it, so that the reasons
   are simulated, too.
6. It ends if nothing is left for steps 4 and 5, or if `simulations` are done. The best one is also simulated in XLA's
   order, so that its gain over the same mesh is known.

A choice counts only if it was simulated. What is estimated only says where to look. The order of simulations follows
from the choices alone, so results are equal on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dhelix.errors import DhelixError
from dhelix.passes.sharding.planner import in_words
from dhelix.passes.simulation.choices import Choice
from dhelix.passes.simulation.estimates import Estimate
from dhelix.passes.simulation.simulated_step import SimulatedStep

AT_ONCE = 4
"""Simulations between two corrections. It does not depend on the machine, so that results do not."""

MARGIN = 0.02
"""How much slower than the best a choice may be expected to be and still be simulated."""

_SPILL = 1.1
"""A choice is simulated if it is expected to need at most this share of the memory: the compiler decides."""

_HOPELESS = 2.0
"""If all estimates exceed the memory by this factor, nothing is simulated."""

_CURE = "give more --nodes, a smaller --seq, or GPUs with more memory"

_STIFFNESS = 0.3
"""Weight of small corrections against errors of the simulated steps."""

type Simulate = Callable[[Sequence[Choice]], Iterable[SimulatedStep | str]]
"""Simulates choices, in their order. Instead of a step it may give the reason why there is none."""


@dataclass(frozen=True)
class Simulated:
    """A choice that was simulated.

    Attributes:
      expected: seconds that were expected before.
      refused: why it cannot run; "" if it can.
    """

    choice: Choice
    estimate: Estimate
    expected: float
    step: SimulatedStep | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.step is not None and not self.step.missing

    @property
    def seconds(self) -> float:
        return math.inf if self.step is None else self.step.seconds


@dataclass(frozen=True)
class Lost:
    """The best choice with one value of a trait, as far as is known.

    Attributes:
      behind: how much longer than the best of all, as a fraction; infinite if none fits. It is below 0 only if the
        search ended before it came to this choice.
      simulated: whether its time is simulated. If not, it is expected.
      why: what costs the time, or what does not fit.
    """

    choice: Choice | None
    behind: float
    simulated: bool
    why: str


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
      ranked: simulated choices that fit, the fastest first.
      others: simulated choices that do not fit or cannot run.
      reasons: by trait and value, the best choice with this value.
      considered, too_large: numbers of all choices, and of those that are expected not to fit.
      error: median error of expected times: of the simulations after the first correction, or if there were none, of
        all; as a fraction.
      faster: how many choices that were not simulated are expected to be faster than the best.
      complete: whether no choice that is left is expected within MARGIN of the best.
    """

    ranked: tuple[Simulated, ...]
    others: tuple[Simulated, ...]
    reasons: Mapping[str, Mapping[str, Lost]]
    considered: int
    too_large: int
    error: float
    faster: int
    complete: bool


def search(
    choices: Sequence[Choice],
    estimator: Callable[[Choice], Estimate],
    simulate: Simulate,
    limit: float,
    simulations: int,
    on_round: Callable[[Sequence[Simulated]], None] = lambda done: None,
) -> Found:
    """The fastest of `choices`.

    Args:
      limit: bytes of memory of a GPU.
      simulations: how many may be done at most, besides XLA's order of the best.
      on_round: called after each round with all that was simulated.

    Raises:
      DhelixError: nothing that was simulated fits. The message says how much is missing.
    """
    # 1.
    state = _State(choices, [estimator(choice) for choice in choices], limit)
    state.check_memory()
    # 2.
    first = state.cover()[:simulations]
    state.take(first, simulate)
    on_round(state.done)
    covered = len(state.done)
    while len(state.done) < simulations:
        # 3.
        state.correct()
        # 4. and 5.
        chosen = (state.promising() or state.uncovered())[: min(AT_ONCE, simulations - len(state.done))]
        # 6.
        if not chosen:
            break
        state.take(chosen, simulate)
        on_round(state.done)
    state.take(state.counterpart(), simulate)
    state.correct()
    return state.found(covered)


@dataclass
class _State:
    """The choices by their indices, what is expected of them, and what was simulated."""

    choices: Sequence[Choice]
    estimates: Sequence[Estimate]
    limit: float
    done: list[Simulated] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = sorted({(trait, value) for choice in self.choices for trait, value in choice.traits().items()})
        self.column = {name: number for number, name in enumerate(names)}
        self.features = np.zeros((len(self.choices), len(names) + 1))
        self.features[:, -1] = 1.0  # the error that all have
        for row, choice in enumerate(self.choices):
            self.features[row, [self.column[trait] for trait in choice.traits().items()]] = 1.0
        self.seconds = np.array([estimate.seconds for estimate in self.estimates])
        self.memory = np.array([estimate.memory for estimate in self.estimates])
        self.row = {choice: number for number, choice in enumerate(self.choices)}
        self.left = np.ones(len(self.choices), dtype=bool)

    @property
    def fits(self) -> np.ndarray:
        """Which choices are expected to fit, or nearly."""
        return self.memory <= _SPILL * self.limit

    def cover(self) -> list[int]:
        """For each value of each trait the choice with the best estimate that fits; the best of all first."""
        if not self.fits.any():  # nothing fits by the estimates, which are coarse: those that need least
            return [int(row) for row in np.argsort(self.memory, kind="stable")[:AT_ONCE]]
        found, covered = list[int](), set[tuple[str, str]]()
        for row in np.lexsort((np.arange(len(self.choices)), self.seconds)):
            traits = set(self.choices[row].traits().items())
            if self.fits[row] and traits - covered:
                found.append(int(row))
                covered |= traits
        return found

    def uncovered(self) -> list[int]:
        """The choices that are the best with a value of a trait, but were not simulated."""
        best = {self._best_with(trait, value) for trait, value in self.column}
        return sorted((row for row in best if row is not None and self.left[row]), key=lambda row: self.seconds[row])

    def counterpart(self) -> list[int]:
        """The best choice in XLA's order, if it was not simulated."""
        if self.best is None or self.best.choice.pp > 1:
            return []
        row = self.row.get(replace(self.best.choice, system="xla"))
        return [row] if row is not None and self.left[row] else []

    def _best_with(self, trait: str, value: str) -> int | None:
        """The fastest choice with a value that fits: simulated, or expected to be."""
        times = np.where(self.left & (self.memory <= self.limit), self.seconds, math.inf)
        for one in self.done:
            times[self.row[one.choice]] = one.seconds if one.fits else math.inf
        times[self.features[:, self.column[trait, value]] == 0.0] = math.inf
        row = int(np.argmin(times))
        return row if math.isfinite(times[row]) else None

    def take(self, rows: Sequence[int], simulate: Simulate) -> None:
        """Simulates some choices."""
        chosen = [self.choices[row] for row in rows]
        for row, result in zip(rows, simulate(chosen), strict=True):
            step, refused = (None, result) if isinstance(result, str) else (result, "")
            expected = float(self.seconds[row])
            self.done.append(Simulated(self.choices[row], self.estimates[row], expected, step, refused))
            self.left[row] = False

    def correct(self) -> None:
        """Fits what is expected to all that was simulated."""
        known = [(one.choice, one.step) for one in self.done if one.step]
        seconds = {self.row[choice]: step.seconds for choice, step in known}
        memory = {self.row[choice]: float(step.memory) for choice, step in known}
        self.seconds = self._corrected(np.array([one.seconds for one in self.estimates]), seconds)
        self.memory = self._corrected(np.array([one.memory for one in self.estimates]), memory)

    def _corrected(self, estimates: np.ndarray, simulated: Mapping[int, float]) -> np.ndarray:
        """The estimates of all choices, with the errors that simulated ones have, by their rows."""
        rows = list(simulated)
        errors = np.log(np.array(list(simulated.values())) / estimates[rows])
        return estimates * np.exp(self.features @ _ridge(self.features[rows], errors))

    @property
    def best(self) -> Simulated | None:
        """The fastest that was simulated and fits."""
        fitting = [one for one in self.done if one.fits]
        return min(fitting, key=lambda one: (one.seconds, self.row[one.choice]), default=None)

    def promising(self) -> list[int]:
        """Choices that may be the fastest, the most promising first."""
        best = self.best
        within = math.inf if best is None else (1.0 + MARGIN) * best.seconds
        rows = np.lexsort((np.arange(len(self.choices)), self.seconds if best else self.memory))
        found = [int(row) for row in rows if self.left[row] and self.seconds[row] <= within]
        return [row for row in found if best is None or self.fits[row]]

    def found(self, covered: int) -> Found:
        """The result. The first `covered` simulations came before any correction."""
        best = self.best
        if best is None:
            raise DhelixError(self._nothing_fits())
        ranked = sorted((one for one in self.done if one.fits), key=lambda one: (one.seconds, self.row[one.choice]))
        later = [one for one in self.done[covered:] if one.step] or [one for one in self.done if one.step]
        left = self.left & (self.memory <= self.limit)
        return Found(
            tuple(ranked),
            tuple(one for one in self.done if not one.fits),
            self._reasons(best),
            len(self.choices),
            int((self.memory > self.limit).sum()),
            float(np.median([abs(one.seconds / one.expected - 1.0) for one in later])),
            int((left & (self.seconds < best.seconds)).sum()),
            not self.promising(),
        )

    def check_memory(self) -> None:
        """Raises DhelixError if nothing can fit, however coarse the estimates are."""
        least = int(np.argmin(self.memory))
        if self.memory[least] > _HOPELESS * self.limit:
            raise DhelixError(
                f"nothing fits into {in_words(self.limit)}: the least is estimated to need "
                f"{in_words(float(self.memory[least]))} ({self.choices[least]}); {_CURE}"
            )

    def _nothing_fits(self) -> str:
        steps = [one for one in self.done if one.step]
        if not steps:
            return f"nothing can run: {self.done[0].refused}"
        least = min(steps, key=lambda one: one.step.memory if one.step else math.inf)
        assert least.step is not None
        return (
            f"nothing fits into {in_words(self.limit)}: the least of {len(steps)} simulated steps needs "
            f"{in_words(least.step.memory)}, {in_words(least.step.missing)} too much ({least.choice}); {_CURE}"
        )

    def _reasons(self, best: Simulated) -> dict[str, dict[str, Lost]]:
        """For each trait, the best choice with each of its values, in their order."""
        assert best.step is not None
        found: dict[str, dict[str, Lost]] = {}
        for trait in best.choice.traits():
            known = [value for name, value in self.column if name == trait]
            values = sorted(known, key=lambda text: (not text.isdecimal(), len(text), text))
            if len(values) > 1:
                found[trait] = {value: self._lost(trait, value, best) for value in values}
        return found

    def _lost(self, trait: str, value: str, best: Simulated) -> Lost:
        row = self._best_with(trait, value)
        simulated = [one for one in self.done if one.choice.traits()[trait] == value]
        if row is None:
            refused = next((one.refused for one in simulated if one.refused), "")
            least = min((one.step.missing for one in simulated if one.step), default=None)
            missing = f"does not fit: {in_words(least)} too much" if least else "does not fit, as estimated"
            return Lost(None, math.inf, bool(simulated), refused if refused and least is None else missing)
        if self.left[row]:
            behind = float(self.seconds[row]) / best.seconds - 1.0
            return Lost(self.choices[row], behind, False, "expected" if behind >= 0.0 else "expected, not reached")
        (one,) = (one for one in simulated if one.choice == self.choices[row])
        return Lost(one.choice, one.seconds / best.seconds - 1.0, True, _why(one, best))


def _ridge(features: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """The effects of the features that explain the errors best, and are small."""
    columns = features.shape[1]
    return np.linalg.solve(features.T @ features + _STIFFNESS * np.eye(columns), features.T @ errors)


_PARTS = {"compute": "compute", "exposed": "exposed communication", "slow_down": "slow-down", "copies": "copies",
          "clock": "a lower clock", "idle": "pauses"}  # fmt: skip


def _why(one: Simulated, best: Simulated) -> str:
    """What makes a step longer than the best one, in words."""
    if one is best or one.step is None or best.step is None:
        return ""
    more = {words: getattr(one.step.parts, name) - getattr(best.step.parts, name) for name, words in _PARTS.items()}
    name = max(more, key=lambda words: more[words])
    return f"{name} +{1e3 * more[name]:,.0f} ms"
