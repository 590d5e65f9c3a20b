"""Summarizes what a profile says about overlap, as the tables of docs/results/overlap.md.

    python benchmarks/collectives/overlap.py profiles/data/h200-nvlink.json --out DIR/overlap_h200_nvlink.json

Prints Markdown tables for each launch setting:

- time that a collective adds to an operator of at least 150 us, in both launch orders;
- overlap effectiveness (OEF) of operators next to collectives, by class and launch order;
- how often each launch order is better, and by how much;
- OEF of operators next to operators, and the time that they save;
- OEF of collectives next to collectives;
- the findings of DHelix figure 4 (`overlap_findings.py`).

Numbers are medians over the pairs of a class whose repeats agree (`PairTiming.steady`).
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dhelix.benchmarks.collectives.overlap_findings import FINDINGS, judge
from dhelix.launch.profile.tables import readable
from dhelix.profiles.files import storage
from dhelix.profiles.keys import CollectiveKey, Key, OperatorKey, PairKey
from dhelix.profiles.profile import PairTiming, Profile, Section

SMS = 132  # streaming multiprocessors of an H200
ORDER_MATTERS = 0.1  # OEF difference from which one launch order counts as better
LONG = 150e-6  # seconds: an operator that is about as long as a collective of 64 MiB
ORDERS = ("compute first", "collective first")
TILE = 128 * 256  # elements of a tile of XLA's Triton GEMMs

# Keys of the operators of DHelix figure 4, in its sizes. `all-to-all` across nodes needs a mesh with two axes.
_FIGURE4 = {
    "gemm": ("gemm bf16,bf16->bf16:nn:cublaslt 8192x7168x8192",),
    "attention": ("attention bf16:causal:bsnh:cudnn 1x16x2x8192x8192x128",),
    "attention-backward": ("attention-backward bf16:causal:bsnh:cudnn 1x16x2x8192x8192x128",),
    "all-gather": ("all-gather 67108864B 2x1 groups=2 nccl", "all-gather 134217728B 4x1 groups=1 nccl"),
    "all-to-all": ("all-to-all 134217728B 2x1 groups=2 nccl",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--settings", default="", help="separated by commas; all if not given")
    parser.add_argument("--out", type=Path, help="write the numbers there as JSON")
    arguments = parser.parse_args()
    profile = storage.load(arguments.profile)
    settings = [s for s in arguments.settings.split(",") if s] or sorted(profile.sections)
    record = {setting: show(profile, setting) for setting in settings if profile.section(setting).pairs}
    if arguments.out:
        arguments.out.write_text(json.dumps({arguments.profile.stem: record}, indent=1) + "\n")


def show(profile: Profile, setting: str) -> dict[str, Any]:
    section = profile.section(setting)
    steady = {key: timing for key, timing in section.pairs.items() if timing.steady}
    print(f"\n## {setting}: {len(steady)} of {len(section.pairs)} pairs are steady\n")
    added = added_microseconds(steady)
    print("class | collective, alone us | adds us, compute first | collective first\n---|---|---|---")
    for name, values in sorted(added.items()):
        print(
            f"{name} | {values.get('alone', 0):.0f} | " + " | ".join(f"{values.get(o, math.nan):.0f}" for o in ORDERS)
        )
    print()
    mixed = classes(steady, mixed_class)
    print_classes("class | collective | first", mixed)
    orders = launch_orders(steady)
    print("beside all-gathers and reduce-scatters | pairs | compute first better | collective first better | worth")
    print("---|---|---|---|---")
    for name, row in orders.items():
        print(f"{name} | " + " | ".join(map(str, row.values())))
    print()
    compute = classes(steady, compute_class)
    print_classes("first | second", compute)
    saved = savings(steady)
    print("computations | pairs | saved of the time in turn: median (10 % to 90 % of the pairs)\n---|---|---")
    for name, row in saved.items():
        print(f"{name} | {row['pairs']} | {row['median']:.1%} ({row['tenth']:.1%} to {row['ninetieth']:.1%})")
    print()
    both = {k: t for k, t in section.pairs.items() if k.first.__class__ is k.second.__class__ is CollectiveKey}
    print("first | second | OEF\n---|---|---")
    for key, timing in sorted(both.items(), key=lambda item: str(item[0])):
        print(f"{readable(key.first)} | {readable(key.second)} | {timing.oef:.2f}")
    effectiveness = figure4(section)
    print("\nfinding | verdict\n---|---")
    verdicts = {finding.name: str(judge(finding, effectiveness)) for finding in FINDINGS}
    for name, verdict in verdicts.items():
        print(f"{name} | {verdict}")
    for pair, oef in sorted(effectiveness.items()):
        print(f"    {' + '.join(pair)} {oef:.2f}")
    return {
        "pairs": len(section.pairs),
        "steady": len(steady),
        "added_us": added,
        "compute_beside_collective": {" | ".join(name): summary(found) for name, found in sorted(mixed.items())},
        "launch_order": orders,
        "compute_beside_compute": {" | ".join(name): summary(found) for name, found in sorted(compute.items())},
        "computations_save": saved,
        "collectives": {str(key): round(timing.oef, 3) for key, timing in both.items()},
        "figure4": {" + ".join(pair): round(oef, 3) for pair, oef in sorted(effectiveness.items())},
        "verdicts": verdicts,
    }


def mixed_class(key: PairKey) -> tuple[str, ...] | None:
    """The class of a pair of operator and collective: (operator, collective, launch order); None for other pairs."""
    if isinstance(key.first, OperatorKey) and isinstance(key.second, CollectiveKey):
        return kind(key.first), f"{key.second.kind}, {key.second.group_size} GPUs", "compute first"
    if isinstance(key.first, CollectiveKey) and isinstance(key.second, OperatorKey):
        return kind(key.second), f"{key.first.kind}, {key.first.group_size} GPUs", "collective first"
    return None


def added_microseconds(pairs: Mapping[PairKey, PairTiming]) -> dict[str, dict[str, float]]:
    """Median microseconds that a collective adds to an operator, by their classes and launch order.

    The added time is the pair's time minus the operator's time alone; `alone` is the collective's time alone. Only
    all-gathers and reduce-scatters of Llama-8B's hidden states (64 MiB, 4 GPUs) and operators of LONG or more count.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, timing in pairs.items():
        name = mixed_class(key)
        collective = next((k for k in (key.first, key.second) if isinstance(k, CollectiveKey)), None)
        if name is None or collective is None or collective.kind not in ("all-gather", "reduce-scatter"):
            continue
        operator, alone = timing.first_alone, timing.second_alone
        if collective is key.first:
            operator, alone = alone, operator
        if operator >= LONG and collective.bytes == 64 * 2**20 and collective.group_size == 4:
            row = found[f"{name[0]} | {name[1]}"]
            row[name[2]].append(1e6 * (timing.seconds - operator))
            row["alone"].append(1e6 * alone)
    return {
        name: {column: round(statistics.median(values), 1) for column, values in row.items()}
        | {f"pairs, {order}": len(row[order]) for order in ORDERS}
        for name, row in sorted(found.items())
    }


def launch_orders(pairs: Mapping[PairKey, PairTiming]) -> dict[str, dict[str, float]]:
    """How often each launch order is better, for operators next to all-gathers and reduce-scatters.

    Only pairs whose two orders are both steady count. `worth` is the median absolute difference of the two OEFs.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for key, timing in pairs.items():
        compute, collective = key.first, key.second
        if not isinstance(compute, OperatorKey) or collective.kind not in ("all-gather", "reduce-scatter"):
            continue
        if (reverse := pairs.get(PairKey(collective, compute))) is not None:
            for name in ("all", kind(compute)):
                found[name].append(timing.oef - reverse.oef)
    return {
        name: {
            "pairs": len(gains),
            "compute first": sum(gain >= ORDER_MATTERS for gain in gains),
            "collective first": sum(gain <= -ORDER_MATTERS for gain in gains),
            "worth": round(statistics.median(map(abs, gains)), 3),
        }
        for name, gains in sorted(found.items())
    }


def compute_class(key: PairKey) -> tuple[str, ...] | None:
    both = isinstance(key.first, OperatorKey) and isinstance(key.second, OperatorKey)
    return (kind(key.first), kind(key.second)) if both else None


def savings(pairs: Mapping[PairKey, PairTiming]) -> dict[str, dict[str, float]]:
    """Saved fraction 1 - P / (T_i + T_j) of two computations, by class. P is their time together, T_i and T_j alone.

    Unlike an OEF, the fraction is small if one of the two is short.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for key, timing in pairs.items():
        if (name := compute_class(key)) is not None:
            for of in ("all", " + ".join(sorted(name))):
                found[of].append(1 - timing.seconds / (timing.first_alone + timing.second_alone))
    rows = {}
    for name, values in sorted(found.items()):
        tenth, *_, ninetieth = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 2
        numbers = {"median": statistics.median(values), "tenth": tenth, "ninetieth": ninetieth}
        rows[name] = {"pairs": len(values), **{of: round(value, 3) for of, value in numbers.items()}}
    return rows


def kind(key: Key) -> str:
    """The class of an operator. Operators of one class share SMs with others in the same way."""
    if key.kind not in ("gemm", "grouped-gemm") or not isinstance(key, OperatorKey):
        return "memory-bound" if key.kind in ("fusion", "copy", "other") else key.kind
    if "triton" not in key.family:
        return "GEMM, cuBLAS"
    tiles = key.sizes[0] * key.sizes[1] // TILE
    return f"GEMM, Triton, {'one wave' if tiles <= SMS else 'waves'}"


def classes(
    pairs: Mapping[PairKey, PairTiming], name: Callable[[PairKey], tuple[str, ...] | None]
) -> dict[tuple[str, ...], list[tuple[PairKey, PairTiming]]]:
    found = defaultdict(list)
    for key, timing in pairs.items():
        if (of_class := name(key)) is not None:
            found[of_class].append((key, timing))
    return dict(found)


def summary(found: Iterable[tuple[PairKey, PairTiming]]) -> dict[str, float]:
    """Medians of the OEF and of each side's slow-down: its time in the pair, divided by its time alone.

    `slow_down` is the operator's if the pair has a collective, else that of the side that is launched first.
    """
    rows = []
    for key, timing in found:
        sides = [timing.first / timing.first_alone, timing.second / timing.second_alone]
        if isinstance(key.first, CollectiveKey):
            sides.reverse()
        rows.append((timing.oef, *sides, timing.spread / min(timing.first_alone, timing.second_alone)))
    oef, one, other, spread = (statistics.median(column) for column in zip(*rows, strict=True))
    values = {"oef": oef, "lowest": min(r[0] for r in rows), "highest": max(r[0] for r in rows)}
    values |= {"slow_down": one, "slow_down_other": other, "spread": spread}
    return {"pairs": len(rows), **{name: round(value, 3) for name, value in values.items()}}


def print_classes(heads: str, found: Mapping[tuple[str, ...], list[tuple[PairKey, PairTiming]]]) -> None:
    print(f"{heads} | pairs | OEF (lowest to highest) | slow-downs | spread")
    print("---|" * (heads.count("|") + 4) + "---")
    for name, pairs in sorted(found.items()):
        s = summary(pairs)
        oef = f"{s['oef']:.2f} ({s['lowest']:.2f} to {s['highest']:.2f})"
        slow = f"{s['slow_down']:.2f} / {s['slow_down_other']:.2f}"
        print(f"{' | '.join(name)} | {s['pairs']} | {oef} | {slow} | {s['spread']:.2f}")
    print()


def figure4(section: Section) -> dict[tuple[str, str], float]:
    """OEF of figure 4's steady pairs, by operator names in launch order.

    If an operator has two sizes, the higher OEF counts. An OEF above 1 counts as 1 if it is noise (`Section.noisy`).
    """
    names = {key: name for name, keys in _FIGURE4.items() for key in keys}
    steady = {key: timing for key, timing in section.pairs.items() if timing.steady}
    shown = {key: min(timing.oef, 1.0) if section.noisy(key) else timing.oef for key, timing in steady.items()}
    sides = ((names.get(str(k.first)), names.get(str(k.second)), oef) for k, oef in shown.items())
    found: dict[tuple[str, str], float] = {}
    for first, second, oef in sides:
        if first and second:
            found[first, second] = max(oef, found.get((first, second), oef))
    return found


if __name__ == "__main__":
    main()
