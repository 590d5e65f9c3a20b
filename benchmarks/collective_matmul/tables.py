"""Tables of the results of `run.py`, and the times that dhelix ships, made from the same files.

    python benchmarks/collective_matmul/tables.py FILE.json FILE.json ...        # prints the tables
    python benchmarks/collective_matmul/tables.py FILE.json --ship profiles/data/collective_matmul

`python -m dhelix.benchmarks.pages.write` puts the tables into docs/results/collective-matmul.md.

Files of one GPU, link, setting and axis size make one set of tables. If several files hold a site, the last one counts.
Forms that only an earlier file has are scaled by the ratio of the monolithic form's times. `--ship` writes one file for
each GPU and link, with all axis sizes.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dhelix.benchmarks.collective_matmul.results import Results
from dhelix.benchmarks.collective_matmul.sites import DISTFUSE_ROWS, MODELS
from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import KINDS, MONOLITHIC, Site, Times, choose
from dhelix.profiles.files import storage

# Goals on 4 H200s over NVLink, as (must, aim): for the share (bound / time), and for the speed-up at DistFuse's sizes.
SHARES: Mapping[str, tuple[float, float]] = {"all_gather_matmul": (0.87, 0.93), "matmul_reduce_scatter": (0.85, 0.92)}
SPEED_UP = (1.2, 1.35)


@dataclass(frozen=True)
class Paper:
    """A row of DistFuse's table 1, in microseconds, measured on 4 A100-40GB over NVLink."""

    gemm: float
    all_reduce: float
    together: float
    distfuse: float


DISTFUSE = {8192: Paper(166.0, 221.0, 387.0, 333.8), 28672: Paper(534.5, 221.0, 764.5, 621.6)}
"""Rows of table 1 by global K; M is 1024, N 8192."""


@dataclass(frozen=True)
class Group:
    """Results that are merged: one GPU, link, setting and axis size."""

    results: Sequence[Results]

    @property
    def times(self) -> Times:
        return merged(self.results)

    @property
    def names(self) -> dict[Site, str]:
        """Names of the measured sites, ordered by kind, name and size."""
        timed = self.times.sites
        names = {site: found.name for r in self.results for site, found in r.sites.items() if site in timed}
        return {site: names[site] for site in sorted(names, key=lambda s: (KINDS.index(s.kind), names[s], s))}


def merged(results: Iterable[Results]) -> Times:
    """The times of all results, which must have the same GPU, link and setting."""
    first, *others = (result.times() for result in results)
    for later in others:
        first = first.merged(later)
    return first


def groups(results: Iterable[Results], by_devices: bool = True) -> list[Group]:
    """Groups the results, in the order of the files. Without `by_devices`, a group holds all axis sizes."""
    found: dict[tuple[str, str, str, int], list[Results]] = {}
    for r in results:
        found.setdefault((r.on.gpu, r.link, r.setting, by_devices * r.devices), []).append(r)
    return [Group(of_one) for of_one in found.values()]


def tables(results: Sequence[Results]) -> str:
    """All tables, in Markdown."""
    return "\n\n".join(_of_group(group) for group in groups(results)) + "\n"


def _of_group(group: Group) -> str:
    times, names = group.times, group.names
    parts = [_head(group)]
    for kind in KINDS:
        of_kind = {site: name for site, name in names.items() if site.kind == kind}
        if of_kind:
            parts += [_sentence(kind, times, of_kind), _markdown(collective_matmul_times.share_table(times, of_kind))]
    parts += [_distfuse(times), _checked(group), _missing(group)]
    return "\n\n".join(part for part in parts if part)


def _head(group: Group) -> str:
    first = group.results[0]
    dates = ", ".join(sorted({r.on.date for r in group.results}))
    machines = ", ".join(sorted({r.on.machine for r in group.results if r.on.machine})) or "unknown"
    rounds = sorted({len(us) for r in group.results for m in r.sites.values() for us in m.us.values()})
    return (
        f"**{first.on.gpu}, axis of {first.devices}, {first.link}, setting {first.setting}; medians of "
        f"{' or '.join(map(str, rounds))} rounds** (machine {machines}, jax {first.on.jax}, NCCL "
        f"{first.on.nccl or 'unknown'}, {dates})"
    )


def _sentence(kind: str, times: Times, sites: Iterable[Site]) -> str:
    """A sentence with the shares of the chosen forms, the shares of the monolithic form, and the goal."""
    chosen, monolithic = [], []
    for site in sites:
        here = times.sites[site]
        if MONOLITHIC in here.forms:
            chosen.append(here.bound / here.forms[choose(site, times)].seconds)
            monolithic.append(here.bound / here.forms[MONOLITHIC].seconds)
    if not chosen:
        return f"`{kind}`"
    text = (
        f"`{kind}`: share of the chosen form, median {statistics.median(chosen):.3f}, least {min(chosen):.3f}; of the "
        f"monolithic form {statistics.median(monolithic):.3f}, {min(monolithic):.3f}"
    )
    if kind in SHARES:
        text += " (must be {}, should be {} on 4 H200s over NVLink)".format(*SHARES[kind])
    return text + "."


def _distfuse(times: Times) -> str:
    """Compares DistFuse's table 1 with the same shapes here; "" if none was measured."""
    rows: list[tuple[str, ...]] = [(
        "global K", "GEMM µs", "all-reduce µs", "monolithic µs", "chosen µs", "form", "speed-up",
        "paper: GEMM, all-reduce, together", "paper: DistFuse", "paper: speed-up",
    )]  # fmt: skip
    sums = [0.0, 0.0, 0.0]  # seconds of all rows: monolithic, chosen, all-reduces
    for site in sorted(times.sites):
        here, paper = times.sites[site], DISTFUSE.get(site.contraction * site.axis_size)
        shape = (KINDS[2], DISTFUSE_ROWS, MODELS[-1].hidden)
        if paper is None or (site.kind, site.rows, site.columns) != shape or MONOLITHIC not in here.forms:
            continue
        form = choose(site, times)
        plain, best = here.forms[MONOLITHIC].seconds, here.forms[form].seconds
        sums = [a + b for a, b in zip(sums, (plain, best, here.collective.seconds), strict=True)]
        ours = (f"{1e6 * s:.1f}" for s in (here.gemm.seconds, here.collective.seconds, plain, best))
        printed = (f"{paper.gemm}, {paper.all_reduce}, {paper.together}", f"{paper.distfuse}")
        speed_up, of_paper = f"{plain / best:.2f}", f"{paper.together / paper.distfuse:.2f}"
        rows.append((str(site.contraction * site.axis_size), *ours, form.name, speed_up, *printed, of_paper))
    if len(rows) == 1:
        return ""
    must = (
        "DistFuse's table 1 (M 1024, N 8192; the paper: 4 x A100-40GB), speed-up must be {}, should be {} on 4 H200s:"
    )
    text = must.format(*SPEED_UP) + "\n\n" + _markdown(rows)
    if len(rows) <= len(DISTFUSE):
        return text
    plain, best, collectives = sums
    return (
        f"{text}\n\nOver both rows, the paper's sentences read: products and all-reduces one after the other take "
        f"{plain / best - 1:.1%} longer (the paper: 20.5 %), and {(plain - best) / collectives:.1%} of the time of the "
        "all-reduces is gained (44.3 %)."
    )


def _checked(group: Group) -> str:
    found = [
        (difference, f"{key.partition(':')[0]}, {site.key}")
        for r in group.results
        for site, measured in r.sites.items()
        for key, difference in measured.differs.items()
        if key in measured.us
    ]
    if not found:
        return ""
    worst, where = max(found)
    return f"All results differ from float32 by at most {worst:.4f} of the largest number ({where})."


def _missing(group: Group) -> str:
    """Lists forms without times by reason, and counts sites that the budgets had no time for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in group.results:
        for site, measured in r.sites.items():
            for key, why in measured.failed.items():
                reasons.setdefault((key.partition(":")[0], why), []).append(f"{key} at {site.key}")
    lines = [f"- {name}, {len(at)} times, such as {at[0]}: {why}" for (name, why), at in reasons.items()]
    lines += _dropped(group)
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def _dropped(group: Group) -> list[str]:
    """For each kind, the number of sites that no call had time for."""
    known = {site.key for site in group.times.sites}
    left = dict.fromkeys(line for r in group.results for line in r.dropped if not any(k in line for k in known))
    kinds = collections.Counter(kind for line in left for kind in KINDS if kind in line)
    return [f"- {kind}: no time left for {count} of the sites" for kind, count in kinds.items()]


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def without_leads(times: Times) -> Times:
    """Leaves out tiles of reduce-scatters that have a lead (`Tiles.lead`), and sites with no other tiles.

    They were measured with an earlier kernel, which stored a tile before it multiplied the next one. Today's kernel
    does both at once, and is faster without a lead. A site that is left out uses the choice of its neighbours.
    """
    sites = {}
    for site, here in times.sites.items():
        leads = {f for f in here.forms if site.kind == KINDS[1] and f.tiles is not None and f.tiles.lead is not None}
        if not leads or any(form.tiles is not None for form in here.forms.keys() - leads):
            sites[site] = replace(here, forms={f: timing for f, timing in here.forms.items() if f not in leads})
    return replace(times, sites=sites)


def ship(results: Sequence[Results], folder: Path) -> list[Path]:
    """Writes the times that the library reads, one file for each GPU and link; the launch setting `default` only."""
    paths = []
    for group in groups([r for r in results if r.setting == "default"], by_devices=False):
        times = without_leads(group.times)
        paths.append(folder / storage.file_name(times.hardware, times.link))
        collective_matmul_times.save(times, paths[-1])
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--ship", type=Path, help="a folder, to write times into")
    arguments = parser.parse_args()
    try:
        results = [Results.read(path) for path in arguments.files]
        shipped = [] if arguments.ship is None else ship(results, arguments.ship)
        print("\n".join(map(str, shipped)) or tables(results))
    except (DhelixError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
