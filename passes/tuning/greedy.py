"""The search of the paper: each step makes the collective faster that costs computation least (Lagom algorithms 1, 2).

    all collectives at the smallest setting
      -> measure. If computation takes longer, nothing can be gained: more channels only slow it down
      -> the collective with the least H grows by algorithm 2, until no collective may grow
         H = seconds of computation paid / seconds of communication gained, by its last step

The printed algorithms contradict themselves; what is built here is corrected:

    printed                                 here
    the rate (x' - x) / x'                  (x - x') / x', limited, as a factor: it is positive while x falls
    first measured in the loop              before the loop, because algorithm 2 compares
    the larger setting stays at the end     the faster one stays

The printed algorithms end as soon as more resources no longer help. They tie channels to chunks, so they overshoot on a
coarse grid. `guided_search.py` is nearer to the optimum; this search is a baseline.

Cost: some four measurements for each collective.
"""

from __future__ import annotations

from dhelix.passes.tuning.measurements import LimitReached, Measurements
from dhelix.passes.tuning.space import Settings, Space
from dhelix.profiles.channels.model_fit import MeasuredTimes

_FIRST_H = 0.01
_RATES = 0.1, 1.0
_LEAST = 1e-9
"""Seconds: the least time that a step is said to gain."""


def greedy(measurements: Measurements, space: Space, collectives: int) -> MeasuredTimes:
    """Runs the paper's search for an overlap of so many collectives. Returns the best settings with their times."""
    current = measurements.of((space.smallest,) * collectives)
    if current.bound_by_computation:
        return current
    cost, rate = [_FIRST_H] * collectives, [_RATES[1]] * collectives
    growing = set(range(collectives))
    while growing:
        j = min(growing, key=lambda one: (cost[one], one))
        settings = _grown(current.settings, j, space, rate[j])
        if settings == current.settings:
            growing.discard(j)
            continue
        try:
            after = measurements.of(settings)
        except LimitReached:
            break
        x, faster = current.collectives[j], after.collectives[j]
        if faster > x * (1.0 + measurements.noise):  # (a) the collective itself is no faster
            growing.discard(j)
        elif after.bound_by_computation:  # (b) communication is hidden; more would only slow computation down
            return min(current, after, key=lambda one: one.seconds)
        else:  # (c)
            paid = sum(after.computations) - sum(current.computations)
            noise = measurements.noise * sum(current.computations)
            cost[j] = max(paid, noise, 0.0) / max(x - faster, _LEAST)
            rate[j] = min(max((x - faster) / faster, _RATES[0]), _RATES[1])
            current = after
    return current


def _grown(settings: Settings, j: int, space: Space, rate: float) -> Settings:
    return (*settings[:j], space.grown(settings[j], rate), *settings[j + 1 :])
