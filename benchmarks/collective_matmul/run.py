"""Measures collective matmuls in all forms, and the product and the collective alone. One process, on 2 or 4 GPUs.

    python benchmarks/collective_matmul/run.py --tune 1024,8192 --budget_s 500 --out DIR      # the most important first
    python benchmarks/collective_matmul/run.py --known DIR/*.json --name rest --out DIR       # sites missing there
    python benchmarks/collective_matmul/run.py --kinds matmul_all_reduce --rows 1024 --forms mosaic --tune 1024
    NCCL_P2P_DISABLE=1 python benchmarks/collective_matmul/run.py --rows 4096 --out DIR
    python benchmarks/collective_matmul/tables.py DIR/*.json

A site is a collective matmul with given sizes (`sites.py`). A form is an implementation of it. For each site, the
programs are compiled in parallel threads, as loops (`programs.py` says why): the GEMM alone (cuBLAS through XLA), the
collective alone (NCCL), the monolithic form, and the forms of `--forms`. Each program runs once, and the result of a
form is compared with float32. Then all programs take turns, round by round, so clocks, heat and slow periods of the
machine affect all of them. A form that fails or gives a wrong result is recorded with the reason and without times.

Mosaic kernels use the tiles of `--tiles`. At forward sites with the rows of `--tune`, they try every candidate.
Elsewhere they use the best tiles of the nearest site measured so far, or the kernels' own tiles if there is none. They
use peer memory even if NCCL may not, so they are left out if peer-to-peer is disabled.

XLA compiles matrix products to cuBLAS only, not to Triton. cuBLAS is the baseline, and leaving out Triton saves most of
the compile time.

The results file is complete after every site. With `--budget_s`, no site starts that would no longer fit. If a program
hangs, the process ends after `--site_s` seconds, so at most the current site is lost.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
from jax.sharding import Mesh

from dhelix.benchmarks.collective_matmul import programs as programs
from dhelix.benchmarks.collective_matmul.programs import Program
from dhelix.benchmarks.collective_matmul.results import COLLECTIVE, GEMM, Measured, Results, merged
from dhelix.benchmarks.collective_matmul.sites import is_backward, sites
from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul.sites import FORMS, KINDS, MONOLITHIC, Form, Site, Tiles
from dhelix.runtime.processes.launch_settings import link_of, setting_of, without_graphs
from dhelix.runtime.profiling.provenance import provenance

_SENT_ROWS = (
    "128x256x64,steps=4,wide=M,group=8",
    "128x256x64,steps=4,wide=M,group=8,chunks=4",
    "128x192x64,steps=4,wide=M,group=8,chunks=8",
    "256x128x64,steps=4,wide=M,group=4",
    "128x128x64,steps=5,wide=M,group=8",
)
_SCATTERED_TILES = (
    "128x256x64,steps=4,wide=M,group=8",
    "128x256x64,steps=4,wide=M,group=8,cluster=2",
    "128x128x64,steps=6,wide=M,group=8",
)
_REDUCED_TILES = (
    "128x128x64,steps=6,wide=M,group=8,cluster=2,lead=33",
    "128x128x64,steps=6,wide=M,group=8,lead=33",
    "128x256x64,steps=4,wide=M,group=8",
    "128x256x64,steps=4,wide=M,group=8,lead=33",
)
CANDIDATES = {
    kind: tuple(map(Tiles.parse, tiles))
    for kind, tiles in zip(KINDS, (_SENT_ROWS, _SCATTERED_TILES, _REDUCED_TILES), strict=True)
}
"""Tiles that `--tune` tries without `--tiles`, by kind. A kernel refuses unfit tiles before it is compiled."""
CHUNKS = (2, 4, 8)
_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
_BEST_TILES = 2  # number of tiles that a site takes from the nearest tuned site
_FLOPS, _BYTES = 6e14, 2e11  # per second; guesses, used only to choose the number of iterations
_FEWEST, _MOST = 4, 200  # iterations


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--devices", type=int, default=0, help="size of the axis; 0: all there are")
    made.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    made.add_argument("--shapes", default="", help="parts of names, or MxKxN on one device, separated by commas")
    made.add_argument("--rows", default="", help="tokens, separated by commas")
    made.add_argument("--forms", default=",".join(FORMS), help="separated by commas; hybrid:4 is one of the hybrids")
    made.add_argument(
        "--tiles", nargs="+", default=[], type=Tiles.parse, help="such as 128x256x64,steps=4,wide=M,group=8"
    )
    made.add_argument("--tune", default="", help="rows of the sites where all tiles are tried, separated by commas")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--rounds", type=int, default=6, help="turns of each program")
    made.add_argument("--run_ms", type=float, default=10.0, help="about how long one turn of the whole work takes")
    made.add_argument("--iterations", type=int, default=0, help="of a turn, instead of --run_ms")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compiles at a time")
    made.add_argument("--budget_s", type=float, default=0.0, help="seconds for all sites; 0: no limit")
    made.add_argument("--site_s", type=float, default=120.0, help="seconds after which a site is taken to hang")
    made.add_argument("--known", nargs="+", default=[], type=Path, help="results whose sites are left out, tiles used")
    made.add_argument("--out", type=Path, default=Path("benchmark-output"))
    made.add_argument("--name", default="", help="of the result file")
    return made


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, as in the other benchmarks
    try:
        print(f"results in {measure(parser().parse_args())}")
    except DhelixError as error:
        sys.exit(str(error))


def measure(arguments: argparse.Namespace) -> Path:
    """Measures all sites. Returns the results file, which is complete after each site."""
    began, longest = time.monotonic(), 0.0
    n = arguments.devices or len(jax.devices())
    mesh = Mesh(jax.devices()[:n], (programs.AXIS,))
    wanted = sites(n, arguments.dtype, _list(arguments.kinds), _list(arguments.shapes), _numbers(arguments.rows))
    known = merged(map(Results.read, arguments.known)) if arguments.known else {}
    link = link_of(os.environ)
    results = Results(provenance(), link, n, setting_of(os.environ).name)
    path = _unused(arguments.out, arguments.name or _name(results))
    todo = [(name, site) for name, site in wanted if site not in known]
    for number, (name, site) in enumerate(todo):
        left = arguments.budget_s - (time.monotonic() - began) if arguments.budget_s else math.inf
        if left < 1.2 * longest:
            results.dropped = [f"{name}: {site.key}" for name, site in todo[number:]]
            results.write(path)
            print(f"dropped {len(results.dropped)} sites: {left:.0f} s left, the longest took {longest:.0f} s")
            break
        start = time.monotonic()
        forms = _forms(arguments, name, site, link, {**known, **results.sites})
        faulthandler.dump_traceback_later(arguments.site_s, exit=True)
        results.sites[site] = measure_site(name, site, forms, mesh, arguments)
        faulthandler.cancel_dump_traceback_later()
        results.write(path)
        longest = max(longest, time.monotonic() - start)
        print(f"{results.sites[site].line(site)}   [{time.monotonic() - start:.1f} s]", flush=True)
    results.write(path)
    return path


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _list(text)]
    except ValueError:
        raise DhelixError(f"{text!r}: give whole numbers, separated by commas") from None


def _name(results: Results) -> str:
    gpu = results.on.gpu.lower().removeprefix("nvidia").strip().replace(" ", "-")
    return f"collective_matmul_{gpu}x{results.devices}_{results.link}"


def _unused(folder: Path, name: str) -> Path:
    """A path that no file has yet, so that earlier results are never replaced."""
    paths = (folder / f"{name}{suffix}.json" for suffix in itertools.chain([""], map("_{}".format, itertools.count(2))))
    return next(path for path in paths if not path.exists())


def _forms(
    arguments: argparse.Namespace, name: str, site: Site, link: str, known: Mapping[Site, Measured]
) -> list[Form]:
    """The forms to measure at a site: the monolithic form as the baseline, and those of `--forms`."""
    found = {MONOLITHIC}
    for form in _list(arguments.forms):
        if form == "hybrid":
            found |= {Form("hybrid", chunks) for chunks in CHUNKS}
        elif form != "mosaic":
            found.add(Form.parse(form))
        elif link != "no-p2p":
            tuned = site.rows in _numbers(arguments.tune) and not is_backward(name)
            found |= {Form("mosaic", tiles=tiles) for tiles in _tiles(arguments.tiles, tuned, site, known)}
    return sorted(found, key=lambda form: form.order)


def _tiles(given: Sequence[Tiles], tuned: bool, site: Site, known: Mapping[Site, Measured]) -> Sequence[Tiles | None]:
    if given or tuned:
        return given or CANDIDATES[site.kind]
    related = [other for other in known if other.family == site.family and known[other].best_tiles()]
    nearest = min(related, key=lambda other: (math.dist(_logs(other), _logs(site)), other), default=None)
    return [None] if nearest is None else known[nearest].best_tiles()[:_BEST_TILES]


def _logs(site: Site) -> list[float]:
    return [math.log(max(size, 1)) for size in site.sizes]


def measure_site(name: str, site: Site, forms: Sequence[Form], mesh: Mesh, arguments: argparse.Namespace) -> Measured:
    """Compiles, checks and times all programs of a site."""
    measured = Measured(name, arguments.iterations or iterations(site, arguments.run_ms))
    operands = programs.operands(site, mesh)
    expected = jax.block_until_ready(programs.reference(site, mesh, operands["x"], operands["w"]))
    turns: dict[str, Turn] = {}
    for program, loop in _compiled(site, forms, mesh, measured.iterations, arguments.threads):
        try:
            turn = Turn(loop.result(), *programs.arguments(program, site, mesh, operands))
            turn.run()
            if program.name not in (GEMM, COLLECTIVE):
                measured.differs[program.name] = float(programs.difference(expected, turn.out))
                _check(measured.differs[program.name], site)
            turns[program.name] = turn
        except Exception as error:  # one failed form must not stop the others
            measured.failed[program.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    del expected
    order = collections.deque(turns)
    for _ in range(arguments.rounds):
        for program in order:
            seconds = turns[program].run()
            measured.us.setdefault(program, []).append(round(1e6 * seconds / measured.iterations, 3))
        order.rotate()
    return measured


def iterations(site: Site, run_ms: float) -> int:
    """The number of iterations for which a product and then its collective take about `run_ms` milliseconds."""
    m, k, n = site.sizes
    moved = 2 * m * (k if site.kind == "all_gather_matmul" else n)
    guess = 2 * m * k * n / _FLOPS + moved / _BYTES
    return min(max(math.ceil(run_ms / 1e3 / guess), _FEWEST), _MOST)


def _compiled(
    site: Site, forms: Sequence[Form], mesh: Mesh, iterations: int, threads: int
) -> list[tuple[Program, Future[Callable[..., jax.Array]]]]:
    """Programs and their finished compilations. XLA times kernels while it compiles, so no program runs then."""
    options = {} if mesh.devices.flat[0].platform == "cpu" else _OPTIONS

    def compiled(program: Program) -> Callable[..., jax.Array]:
        return programs.lowered(program, site, mesh, iterations).compile(compiler_options=options)

    with ThreadPoolExecutor(threads) as pool:
        return [(program, pool.submit(compiled, program)) for program in programs.programs(site, forms)]


def _check(difference: float, site: Site) -> None:
    if not difference <= programs.tolerance(site):
        raise DhelixError(
            f"wrong by {difference:.2g} of the largest result, allowed are {programs.tolerance(site):.2g}"
        )


class Turn:
    """A compiled loop with its operands. Each run donates the previous run's result as its buffer."""

    def __init__(self, loop: Callable[..., jax.Array], out: jax.Array, *operands: jax.Array) -> None:
        self._loop, self._operands, self.out = loop, operands, out

    def run(self) -> float:
        """Runs the loop once. Returns the seconds from the launch until all devices are done."""
        start = time.perf_counter()
        self.out = jax.block_until_ready(self._loop(self.out, *self._operands))
        return time.perf_counter() - start


if __name__ == "__main__":
    without_graphs(os.environ)  # CUDA graphs must not hold Mosaic kernels
    main()
