"""For which bandwidths and activation sizes are the plans of AMSP's table IV the cheapest?

    ranges(MODELS["llama-7b"], fit(), amsp.SIZES)      # [Range(0, 42.9e9, 7B's plan), Range(42.9e9, ...), ...]

The paper uses one plan for 8 to 1024 GPUs, and has no size of activations and temporary buffers, A. So A is the unknown
here. For every A between 0 and the memory of a GPU, the plan with the least communication is taken, as the printed
planner does: T in all, without overlap. T is summed over all numbers of GPUs. Times within 2 % count as equal, and then
the least memory wins. A plan needs this much:

    b_P Phi / |s_p| + b_G Phi / |s_g| + b_O Phi / |s_os| + A

So the choice changes only where a plan begins to fit, and the ranges are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dhelix.benchmarks.sharding.fitted import NODE, Fitted
from dhelix.benchmarks.sharding.reproduction import plan_of
from dhelix.passes.sharding.collective_times import Links, LinkTimes
from dhelix.passes.sharding.factors import Factor, Factors, admissible
from dhelix.passes.sharding.memory import memory
from dhelix.passes.sharding.overlap import NOTHING
from dhelix.passes.sharding.planner import TIE
from dhelix.passes.sharding.step_times import StepTimes
from dhelix.profiles.hardware import A800
from dhelix.profiles.papers import amsp
from dhelix.profiles.papers.amsp import MODELS, Model

GB = 1e9

SMALLEST = {"llama-7b": 8, "llama-13b": 8, "llama-30b": 16, "llama-30b-6656": 16}
"""The smallest number of GPUs that the plan must do for. 30B's optimizer states need two nodes."""

APART = 36e9
"""A that lies in the ranges of all models, for plans of each number of GPUs apart."""


@dataclass(frozen=True)
class Range:
    """A range of A, in bytes, in which one plan is the cheapest; `plan` is None where nothing fits."""

    low: float
    high: float
    plan: Factors | None


def variants(cluster: Fitted) -> dict[str, Fitted]:
    """The fitted cluster, and clusters with other links and buckets, by name."""
    found = {
        "fitted": cluster,
        "fitted, one group alone": replace(cluster, links=replace(cluster.links, siblings=False)),
    }
    for within, between, siblings in product((80e9, 160e9, 240e9), (40e9, 70e9, 100e9), (False, True)):
        words = "" if siblings else ", one group alone"
        links = Links(within, between, 3e-6, 10e-6, siblings, tree=False)
        name = f"rings, {within / GB:.0f} GB/s in a node, {between / GB:.0f} between nodes{words}"
        found[name] = replace(cluster, links=links, bucket=256e6)
    return found


def ranges(model: Model, cluster: Fitted, sizes: Sequence[int]) -> list[Range]:
    """The cheapest plan for every A, from small to large. Neighbouring ranges have different plans.

    Args:
      sizes: numbers of GPUs that the plan must do for.
    """
    states, seconds = _states(model, cluster, min(sizes)), _seconds(model, cluster, sizes)
    room = {plan: A800.memory_bytes - states[plan] for plan in seconds}
    ends = sorted({end for end in room.values() if end > 0.0})
    found: list[Range] = []
    low = 0.0
    for high in [*ends, A800.memory_bytes]:
        best = _cheapest([plan for plan in seconds if room[plan] >= high], seconds, states)
        if found and found[-1].plan == best:
            found[-1] = replace(found[-1], high=high)
        else:
            found.append(Range(low, high, best))
        low = high
    return found


def _cheapest(plans: list[Factors], seconds: dict[Factors, float], states: dict[Factors, float]) -> Factors | None:
    if not plans:
        return None
    least = min(seconds[plan] for plan in plans)
    near = [plan for plan in plans if seconds[plan] <= (1.0 + TIE) * least]
    return min(near, key=lambda plan: (states[plan], plan.optimizer.size, seconds[plan], str(plan)))


def _plans(smallest: int) -> Iterator[Factors]:
    """Plans for the smallest number of GPUs. They do for every larger number."""
    yield from admissible(Factor(NODE, smallest // NODE))


def _states(model: Model, cluster: Fitted, smallest: int) -> dict[Factors, float]:
    job = cluster.job(model, 1)
    return {plan: memory(job.sizes, plan, job.kept, job.batch, job.bucket).states for plan in _plans(smallest)}


def _seconds(model: Model, cluster: Fitted, sizes: Sequence[int]) -> dict[Factors, float]:
    """Seconds of all communication of a step, summed over numbers of GPUs."""
    times = LinkTimes(cluster.links)
    found = dict.fromkeys(_plans(min(sizes)), 0.0)
    for size in sizes:
        job, mesh = cluster.job(model, amsp.SEQUENCES // size), Factor(NODE, size // NODE)
        for plan in found:
            found[plan] += StepTimes.of(job, replace(plan, mesh=mesh), times, NOTHING).total
    return found


def table(cluster: Fitted) -> list[dict[str, object]]:
    """For each model, the ranges of A, in GB, in which table IV's plan is chosen, and the variants that have them."""
    rows: dict[tuple[object, ...], tuple[list[str], list[str]]] = {}
    for words, variant in variants(cluster).items():
        for model in MODELS.values():
            smallest = SMALLEST[model.name]
            sizes = [size for size in amsp.SIZES if size >= smallest]
            *ends, above = _found(ranges(model, variant, sizes), plan_of(model, smallest // NODE))
            names, after = rows.setdefault((model.name, *ends), ([], []))
            names.append(words)
            after += [str(above)] * (above not in after)
    heads = ("model", "from", "to", "below it")
    made = [
        {**dict(zip(heads, row, strict=True)), "above it": " or ".join(after), "variants": names}
        for row, (names, after) in rows.items()
    ]
    return sorted(made, key=lambda row: list(MODELS).index(str(row["model"])))


def _found(found: list[Range], wanted: Factors) -> tuple[object, ...]:
    hits = [n for n, each in enumerate(found) if each.plan == wanted]
    if not hits:
        return None, None, "", "; ".join(_short(each.plan) for each in found)
    first, last = hits[0], hits[-1]
    below = _short(found[first - 1].plan) if first else ""
    above = _short(found[last + 1].plan) if last + 1 < len(found) else ""
    return round(found[first].low / GB, 1), round(found[last].high / GB, 1), below, above


def apart(cluster: Fitted) -> list[dict[str, object]]:
    """The plan of each number of GPUs by itself, with A = `APART`."""
    return [
        {"model": model.name, "gpus": size, "plan": _short(_chosen(model, cluster, size))}
        for model in MODELS.values()
        for size in amsp.SIZES
        if size >= SMALLEST[model.name]
    ]


def _chosen(model: Model, cluster: Fitted, size: int) -> Factors | None:
    return next(each.plan for each in ranges(model, cluster, [size]) if each.low <= APART < each.high)


def _short(plan: Factors | None) -> str:
    if plan is None:
        return "nothing fits"
    return "(" + ", ".join(str(factor) for _, factor in plan.states()) + ")"
