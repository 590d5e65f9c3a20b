"""The predicted gain of a step, as data and as text.

One evaluator times the plain step and the changed step with the same costs:

    predicted step time 294.7 ms -> 271.0 ms (1.09 x as fast)
    changes: exposed communication -34.7 ms, lower clock +14.3 ms, copies -7.9 ms, slow-down from overlap +6.4 ms
    where the time goes: kernels 214.2 ms, exposed communication 11.7 ms (all-gather 64 MiB over tp 6.1 ms), ...
    peak memory 16.14 GiB -> 15.72 GiB (0.97 x, by live ranges)

A step's time is the sum of six parts, so a gain has six causes. `guesses` says how much of the prediction rests on
costs that were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from dhelix.passes.framework.units import gibibytes, milliseconds

MANY_GUESSES = 0.1  # the text mentions guessed costs only above this fraction
_SAME_WORK = 0.01  # steps whose FLOPs differ by at most this fraction do equal work; fusion changes the count a little
_CAUSES = {
    "exposed": "exposed communication",
    "slow_down": "slow-down from overlap",
    "copies": "copies",
    "compute": "kernels",
    "clock": "lower clock",
    "idle": "pauses between kernels",
}


@dataclass(frozen=True)
class StepParts:
    """Predicted times of a scheduled step on one GPU, in seconds.

    `compute + copies + clock + slow_down + exposed + idle` is the whole step.

    Attributes:
      compute: time of the kernels that compute, each as long as it takes alone.
      copies: time of the kernels that only move data or fill buffers on the GPU, each as long as it takes alone.
      clock: time that all these kernels lose because the power limit lowers the clock.
      slow_down: time that all these kernels lose because they overlap with collectives.
      exposed: time for which collectives run while compute waits.
      idle: pauses between kernels.
      flops: floating-point operations of all instructions that are known to have some.
      memory: peak memory in bytes, arguments included; 0 if it was not computed.
      guessed: fraction of the kernels' and collectives' total time (each alone) that is a guess.
      guessed_overlap: fraction of the overlap time for which the profile has no measured pair of collective and
        compute.
      costs: source of the costs, as readable text.
      assumed: constants in these times that were not measured, as readable text; "" if there are none.
      link, setting: interconnect of the GPUs, and launch setting, with which the costs were measured; "" if the costs
        come from a roofline.
      exposed_by: (collective, seconds) for the few collectives that compute waits for longest, longest wait first.
      sent: time of the collectives, each as long as it takes alone. This is no part of the step's time, because
        collectives may overlap with compute.
    """

    compute: float
    copies: float
    clock: float
    slow_down: float
    exposed: float
    idle: float
    flops: float
    memory: int
    guessed: float
    guessed_overlap: float
    costs: str
    assumed: str = ""
    link: str = ""
    setting: str = ""
    exposed_by: tuple[tuple[str, float], ...] = ()
    sent: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.copies + self.clock + self.slow_down + self.exposed + self.idle


@dataclass(frozen=True)
class Gain:
    """The parts of a step without passes (`before`) and with passes (`after`).

    Both steps have the same micro-batches. XLA schedules the step without passes.
    """

    before: StepParts
    after: StepParts

    @property
    def ratio(self) -> float:
        return self.after.seconds / self.before.seconds if self.before.seconds else 1.0

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by which each part of the step got longer (positive) or shorter (negative), largest change first."""
        found = {name: getattr(self.after, name) - getattr(self.before, name) for name in _CAUSES}
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1]), item[0])))

    def time(self) -> str:
        before, after = (milliseconds(step.seconds) for step in (self.before, self.after))
        return f"predicted step time {before} -> {after} ({1.0 / (self.ratio or 1.0):.2f} x as fast)"

    def why(self) -> str:
        """One line on why the times of both steps differ. Leaves out causes below 0.2 % of the time of `before`."""
        least = self.before.seconds / 500
        causes = [f"{_CAUSES[name]} {_signed(s)}" for name, s in self.causes.items() if abs(s) >= least]
        return f"changes: {', '.join(causes) or 'none above 0.2 % of the step time'}"

    def left(self) -> str:
        """One line on where the time of `after` goes, longest part first. Leaves out parts below 0.5 % of this time."""
        parts = {name: getattr(self.after, name) for name in _CAUSES}
        waits = ", ".join(f"{words} {milliseconds(seconds)}" for words, seconds in self.after.exposed_by)
        told = {name: milliseconds(seconds) for name, seconds in parts.items()}
        told["exposed"] += f" ({waits})" if waits else ""
        shown = sorted((n for n in parts if parts[n] > self.after.seconds / 200), key=lambda n: -parts[n])
        return f"where the time goes: {', '.join(f'{_CAUSES[name]} {told[name]}' for name in shown)}"

    def unequal(self) -> str:
        """A warning if the two steps' FLOPs differ by more than 1 % (`_SAME_WORK`); "" if they do not."""
        before, after = self.before.flops, self.after.flops
        if abs(after - before) <= _SAME_WORK * before:
            return ""
        if not before or not after:
            return "floating point operations are known of only one of the two steps, so their times are not comparable"
        return (
            f"the second step computes {after / before:.2f} x as much as the first ({before:.3g} and {after:.3g}"
            " floating point operations), so their times are not comparable"
        )

    def memory(self) -> str:
        before, after = (step.memory for step in (self.before, self.after))
        ratio = f" ({after / before:.2f} x, by live ranges)" if before else ""
        return f"peak memory {gibibytes(before)} -> {gibibytes(after)}{ratio}"


def guesses(step: StepParts) -> str:
    """Text on the costs of `step`: their source, guessed fractions above `MANY_GUESSES`, and assumed constants."""
    said = [f"costs from the {step.costs}"]
    if step.guessed > MANY_GUESSES:
        said.append(f"{step.guessed:.0%} of the operators' time is guessed")
    if step.guessed_overlap > MANY_GUESSES:
        said.append(f"{step.guessed_overlap:.0%} of the overlap time has no measured pairs")
    if step.assumed:
        said.append(f"assumed: {step.assumed}")
    return "; ".join(said)


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{milliseconds(abs(seconds))}"
