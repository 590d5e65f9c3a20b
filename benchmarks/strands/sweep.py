"""Draws the gain of strands by share of communication, from runs of `strands/run.py` on several workloads.

    python benchmarks/strands/sweep.py --tp 2,4 --seq 4096,8192 --channels 0,4 --budget_s 500 --out DIR
    python benchmarks/strands/sweep.py --plot DIR/*.json --picture docs/images/strands-sweep.png

The share of communication is the fraction of the step that it costs XLA's best program: 1 - time without communication
/ time. Limits on NCCL's channels raise it, as slower links would. With `--profile`, `dhelix profile` first measures
operators under each limit, as a user of such a link would. Without `--profile`, dhelix's order is made for the link
without a limit.

The picture also shows the papers' results, if they publish both numbers (`profiles/papers/published.py`). Their share
is the fraction of time that the Megatron-LM baseline spends in collectives, on other GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands.results import Group, groups, read
from dhelix.benchmarks.strands.variants import OURS, SETTINGS, VARIANTS, chosen
from dhelix.errors import DhelixError
from dhelix.launch.shown import figures
from dhelix.profiles.files.storage import SEARCH_PATH
from dhelix.profiles.papers import published
from dhelix.profiles.papers.published import Published

_COMPARED = "plain; strands, dp; plain, no communication; strands, no communication"
_SPEED_UP, _SHARE = "speed-up over Megatron-LM", "share of time in communication"
# (numbers, workload of the speed-up, (workload, kind of collectives) pairs whose shares add up)
_PAPERS: tuple[tuple[Sequence[Published], str, tuple[tuple[str, str], ...]], ...] = (
    (published.DHELIX_A40, "Llama-39B, S 16384, CP 2", (("Llama-39B", " (TP, CP)"),)),
    (published.DHELIX_A40, "Phi-31B, EP 8, DP 16, PP 4, capacity 6", (("Phi-31B", " (EP)"),)),
    (published.DHELIX_A800, "Llama-66B, S 16384, TP 8, CP 2", (("Llama-66B, S 16384, TP 8, CP 2", " (TP)"),)),
)


@dataclass(frozen=True)
class Point:
    """One workload: the fraction of its step that communication costs, and the speed-up."""

    name: str
    share: float
    speed_up: float
    of_paper: bool = False


def points(measured: Sequence[Group]) -> list[Point]:
    """A point for each group that has XLA's best, a dhelix program and the bound."""
    found = []
    for group in measured:
        best, xla, cost = group.best(OURS), group.xla, group.communication_cost
        if best is None or xla is None or cost is None:
            continue
        w = group.run.workload
        cap = f", {w['channels']} channel{'s' * (w['channels'] > 1)}" if w.get("channels") else ""
        setting = best.setting.replace("_", " ")
        shards = f" (shards of {w['shards']})" if w.get("shards") else ""
        name = f"{w['preset'].title()}, TP {w['tp']}{shards}, S {w['seq']}, M {w['microbatches']}{cap}, {setting}"
        found.append(Point(name, cost / xla.median_ms, xla.median_ms / best.median_ms))
    return found


def paper_points() -> list[Point]:
    """Points of DHelix's workloads whose speed-up and share of communication are published."""
    return [
        Point(
            f"DHelix: {workload}",
            sum(_published(numbers, "Megatron-LM", of, _SHARE + kind) for of, kind in shares) / 100,
            _published(numbers, "DHelix", workload, _SPEED_UP),
            of_paper=True,
        )
        for numbers, workload, shares in _PAPERS
    ]


def _published(numbers: Sequence[Published], system: str, workload: str, quantity: str) -> float:
    found = (p for p in numbers if (p.system, p.workload, p.quantity) == (system, workload, quantity))
    return next(found).value


def save_png(drawn: Sequence[Point], path: Path) -> None:
    """Draws speed-ups by share, and their bound: the step takes as long as the longer of communication and the rest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axis = pyplot.subplots(figsize=(10, 5), dpi=150)
    most = max([0.6, *(p.share for p in drawn)]) + 0.03
    shares = [most * n / 100 for n in range(100)]
    bound = [1 / max(s, 1 - s) for s in shares]
    axis.plot(shares, bound, color="#aab2bb", linestyle="--", label="all hidden that compute can hide")
    named: list[str] = []
    placed: list[Point] = []  # points whose number is above them
    for of_paper, colour, marker, label in (
        (True, figures.ALPHA, "s", "DHelix (A40, A800)"),
        (False, figures.BETA, "o", "here"),
    ):
        some = sorted((p for p in drawn if p.of_paper is of_paper), key=lambda p: p.share)
        axis.scatter([p.share for p in some], [p.speed_up for p in some], color=colour, marker=marker, label=label)
        for p in some:
            named.append(f"{len(named) + 1}  {p.name.removeprefix('DHelix: ')}")
            crowded = any(abs(q.share - p.share) < 0.018 and abs(q.speed_up - p.speed_up) < 0.03 for q in placed)
            place = {"xytext": (0, -13 if crowded else 6), "textcoords": "offset points"}
            axis.annotate(str(len(named)), (p.share, p.speed_up), ha="center", size=8, **place)
            placed += [] if crowded else [p]
    axis.text(1.02, 1.0, "\n".join(named), transform=axis.transAxes, size=7, va="top", linespacing=1.8)
    axis.set(xlabel="share of communication", ylabel="speed-up", xlim=(0, most))
    axis.set_ylim(0.95, max([1.5, *(p.speed_up for p in drawn)]) + 0.1)
    axis.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axis.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def sweep(arguments: argparse.Namespace) -> list[Path]:
    """Measures the workloads that the budget has time for. Returns the results files."""
    began, longest, files = time.monotonic(), 0.0, []
    lists = ("channels", "tp", "shards", "seq", "microbatches")
    numbers = (map(int, str(getattr(arguments, name)).split(",")) for name in lists)
    for channels, tp, shards, seq, microbatches in itertools.product(*numbers):
        left = arguments.budget_s - (time.monotonic() - began) if arguments.budget_s else 0.0
        name = f"sweep_tp{tp}" + f"of{shards}" * bool(shards) + f"_s{seq}_m{microbatches}_c{channels}"
        if arguments.budget_s and left < 0.8 * longest:
            print(f"dropped {name}: {left:.0f} s of the budget were left", flush=True)
            continue
        given = {"preset": arguments.preset, "layers": arguments.layers, "vocab": arguments.vocab, "tp": tp}
        given |= {"shards": shards, "seq": seq, "microbatches": microbatches, "channels": channels}
        given |= {"rounds": arguments.rounds, "steps": arguments.steps}
        given |= {"name": name, "out": arguments.out, "budget_s": left}
        options = strands.parser().parse_args(["--no_traces", *(f"--{key}={value}" for key, value in given.items())])
        options.settings = chosen(arguments.settings, SETTINGS, "setting")
        options.variants = chosen(arguments.variants, VARIANTS, "variant")
        start = time.monotonic()
        try:
            if arguments.profile:
                profile(options)
            files.append(strands.measure(options))
        except DhelixError as error:  # one failed workload must not stop the others
            print(f"{name}: {error}", flush=True)
        longest = max(longest, time.monotonic() - start)
    return files


def profile(options: argparse.Namespace) -> None:
    """Measures a workload's operators under its limit on channels, unless the profile already has them.

    Sets the profile search path of this process and its later child processes.

    Raises:
      DhelixError: the measurement failed.
    """
    folder = options.out / f"costs_tp{options.tp}_c{options.channels}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = sorted({SETTINGS[name].profiled for name in options.settings})
    workload = {"preset": options.preset, "layers": options.layers, "seq": options.seq, "mesh": f"tp={options.tp}"}
    workload |= {"microbatches": options.microbatches, "settings": ",".join(settings)}
    command = [sys.executable, "-c", "from dhelix.launch import cli; cli.main()", "profile", "--interleave"]
    command += [f"--{key}={value}" for key, value in workload.items()]
    os.environ[SEARCH_PATH] = str(folder)  # `dhelix profile` writes there, and `strands.measure`'s processes read
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags += [f"--xla_gpu_nccl_collective_max_nchannels={options.channels}"] * bool(options.channels)
    if subprocess.run(command, env={**os.environ, "XLA_FLAGS": " ".join(flags).strip()}).returncode:
        raise DhelixError("its costs were not measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--tp", default="2,4", help="sizes, separated by commas")
    parser.add_argument("--shards", default="0", help="GPUs have as much as with so many; 0: as with --tp")
    parser.add_argument("--seq", default="8192")
    parser.add_argument("--microbatches", default="8")
    parser.add_argument("--channels", default="0", help="most channels of a collective; 0: NCCL's choice")
    parser.add_argument("--settings", default="default,connections1")
    parser.add_argument("--variants", default=_COMPARED)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant, of --steps steps")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="measure costs under each cap first")
    parser.add_argument("--budget_s", type=float, default=0.0, help="seconds for all workloads; 0: no limit")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"))
    parser.add_argument("--plot", type=Path, nargs="+", help="files to draw; nothing is measured")
    parser.add_argument("--picture", type=Path, default=Path("strands-sweep.png"))
    arguments = parser.parse_args()
    try:
        files = arguments.plot or sweep(arguments)
        drawn = [*points(groups([read(file) for file in files])), *paper_points()]
        for point in drawn:
            print(f"{point.name}: communication {point.share:.1%}, {point.speed_up:.3f} times as fast")
        save_png(drawn, arguments.picture)
    except DhelixError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
