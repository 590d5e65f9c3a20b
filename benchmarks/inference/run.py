"""Measures the latency of Llama in inference, with several implementations of matmul and all-reduce.

    python benchmarks/inference/run.py --threads 8 --budget_s 300 --out benchmarks/results/inference_h200x2.json
    python benchmarks/inference/run.py --prefill 1024 --decode --forms mosaic auto      # one case, two variants of ours
    python benchmarks/inference/run.py --whole --preset llama-8b --tp 2 --case_s 500 --out DIR/inference_whole.json
    python benchmarks/inference/results.py benchmarks/results/inference_*.json

Cases are prefill of one sequence and decode with a cache, at the sizes of `--preset`, tensor parallel over all GPUs,
without sequence parallelism (`programs.py`). Variants are XLA with NCCL, each of `--forms` of `matmul_all_reduce`, the
tile-wise all-reduce after a matmul, and no communication, which is the bound.

With `--whole`, a case is the whole model and not only layers. It begins with the embedding of tokens, has all layers of
the preset, and ends with the next tokens. So a call of prefill is the latency of a prompt, and a call of decode that of
a token. Communication's share includes the all-gathers of embedding and output. The third line above runs it on two
GPUs. More layers compile longer, so `--case_s` is larger there.

For each case, XLA's program is compiled first, because its compilation tunes most of the matmuls. The others are then
compiled in parallel. Each program runs once, and its result is compared with XLA's. Then variants take turns, round by
round. A turn has as many calls as take about `--turn_ms` milliseconds. Calls are enqueued one after the other, as in a
serving engine, so a call is launched while the previous one runs. A variant that fails or gives a wrong result is
recorded with the reason and without times.

One process runs everything. The results file is complete after every case. With `--budget_s`, no case starts that would
no longer fit. If a program hangs, the process ends after `--case_s` seconds.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dhelix.benchmarks.collective_matmul.programs import difference
from dhelix.benchmarks.collectives.gpu_clocks import Clocks
from dhelix.benchmarks.inference import programs as programs
from dhelix.benchmarks.inference.programs import Case
from dhelix.benchmarks.inference.results import BOUND, TILE_WISE, XLA, CaseResult, Run, tables
from dhelix.errors import DhelixError
from dhelix.models import LlamaConfig, make_mesh, preset
from dhelix.runtime.processes.launch_settings import link_of, without_graphs
from dhelix.runtime.profiling.provenance import provenance

FORMS = ("monolithic", "hybrid:2", "hybrid:4", "ring", "mosaic", TILE_WISE)
_LAYERS = 8  # without --whole
_WORKLOAD = ("preset", "layers", "tp", "hidden", "ffn", "heads", "kv_heads", "dtype", "whole")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--preset", default="llama-3.1-70b")
    made.add_argument("--layers", type=int, help=f"default: {_LAYERS}; with --whole, all of the preset")
    made.add_argument("--whole", action="store_true", help="the whole model, from tokens to the next tokens")
    made.add_argument("--tp", type=int, default=0, help="GPUs; 0: all there are")
    made.add_argument("--prefill", type=int, nargs="*", default=[1024, 4096], help="tokens of the one sequence")
    made.add_argument("--decode", type=int, nargs="*", default=[16, 64], help="sequences")
    made.add_argument("--cached", type=int, default=4096, help="tokens of each sequence that decode finds in the cache")
    made.add_argument(
        "--forms", nargs="*", default=list(FORMS), help=f'of matmul_all_reduce, such as "auto"; or {TILE_WISE}'
    )
    made.add_argument("--rounds", type=int, default=6, help="turns of each variant")
    made.add_argument("--turn_ms", type=float, default=100.0, help="about how long a turn takes")
    made.add_argument("--calls", type=int, default=0, help="of a turn, instead of --turn_ms")
    made.add_argument("--threads", type=int, default=8, help="compiles at a time, after the first one")
    made.add_argument("--budget_s", type=float, default=0.0, help="seconds for all cases; 0: no limit")
    made.add_argument("--case_s", type=float, default=180.0, help="seconds after which a case is taken to hang")
    made.add_argument("--out", type=Path, default=Path("benchmark-output/inference.json"))
    return made


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast, as in the other benchmarks
    arguments = parser().parse_args()
    try:
        tp = arguments.tp or len(jax.devices())
        layers = _LAYERS if arguments.layers is None and not arguments.whole else arguments.layers
        config = preset(arguments.preset, layers)
        if not isinstance(config, LlamaConfig):
            raise DhelixError(f"{arguments.preset} is no Llama, and only Llama has inference; use a preset of Llama")
        print(tables([measure(config, tp, arguments)]))
    except (DhelixError, ValueError) as error:
        sys.exit(str(error))


def measure(config: LlamaConfig, tp: int, arguments: argparse.Namespace) -> Run:
    """Measures all cases. The results file is complete after each case."""
    bench = Benchmark(config, tp, arguments)
    with Clocks() as clocks:
        for case in bench.todo():
            faulthandler.dump_traceback_later(arguments.case_s, exit=True)
            bench.measure(case, clocks)
            faulthandler.cancel_dump_traceback_later()
            bench.run.write(arguments.out)
    bench.run.write(arguments.out)
    return bench.run


class Benchmark:
    """The weights, which all cases share, and the results so far."""

    def __init__(self, config: LlamaConfig, tp: int, arguments: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.arguments = arguments
        self.mesh = make_mesh(1, tp)
        self.config = programs.config_for(config, self.mesh)
        facts = {**vars(arguments), **vars(config), "tp": tp}
        workload = {name: facts[name] for name in _WORKLOAD}
        self.run = Run(provenance(), link_of(os.environ), workload, tolerance(self.config, tp))
        whole = arguments.whole
        self.cases = [Case("prefill", 1, tokens, whole) for tokens in arguments.prefill]
        self.cases += [Case("decode", batch, arguments.cached, whole) for batch in arguments.decode]

    @functools.cached_property
    def weights(self) -> Any:
        return programs.make_weights(self.config, self.mesh, self.arguments.whole)

    def todo(self) -> Iterator[Case]:
        """Yields cases as long as the budget leaves 1.2 times the time of the longest case so far."""
        longest, budget = 0.0, self.arguments.budget_s or math.inf
        for number, case in enumerate(self.cases):
            start = time.monotonic()
            if start - self.began + 1.2 * longest > budget:
                self.run.dropped = [case.name for case in self.cases[number:]]
                self.say(f"no time left for {'; '.join(self.run.dropped)}")
                return
            yield case
            longest = max(longest, time.monotonic() - start)

    def measure(self, case: Case, clocks: Clocks) -> None:
        """Compiles, checks and times all variants of a case."""
        result = self.run.cases[case.name] = CaseResult()
        compiled = self.compile_all(case, result)
        stack = Stack(self.weights, programs.make_inputs(self.config, self.mesh, case))
        expected: jax.Array | None = None
        for variant, step in list(compiled.items()):
            try:
                x, *_ = jax.tree.leaves(jax.block_until_ready(stack.call(step)))  # of a whole model, the logits
                expected = x if variant == XLA else expected
                if variant not in (XLA, BOUND) and expected is not None:
                    result.differs[variant] = float(difference(expected.astype(jnp.float32), x))
                    check(result.differs[variant], self.run.tolerance)
            except Exception as error:  # one failed variant must not stop the others
                self.fail(case, result, variant, error)
                stack.inputs = programs.make_inputs(self.config, self.mesh, case)  # may be donated
                del compiled[variant]
        if compiled:
            self.take_turns(case, compiled, stack, result, clocks)

    def compile_all(self, case: Case, result: CaseResult) -> dict[str, Callable[..., Any]]:
        """Compiles all programs of a case. XLA's comes first, because this tunes most matmuls of the other programs."""
        variants = [XLA, BOUND, *dict.fromkeys(self.arguments.forms)]

        def compiled(variant: str) -> Callable[..., Any] | None:
            start = time.monotonic()
            try:
                lowered = programs.lowered(self.config, self.mesh, case, variant)
                step = lowered.compile(compiler_options=programs.compiler_options(self.mesh))
                result.compile_s[variant] = round(time.monotonic() - start, 1)
                return step
            except Exception as error:
                self.fail(case, result, variant, error)

        with ThreadPoolExecutor(max(self.arguments.threads, 1)) as pool:
            steps = [compiled(variants[0]), *pool.map(compiled, variants[1:])]
        self.say(f"{case.name}: {sum(map(bool, steps))} of {len(steps)} programs compiled")
        return {variant: step for variant, step in zip(variants, steps, strict=True) if step is not None}

    def take_turns(
        self,
        case: Case,
        compiled: dict[str, Callable[..., Any]],
        stack: Stack,
        result: CaseResult,
        clocks: Clocks,
    ) -> None:
        result.calls = self.arguments.calls or calls(
            stack.turn(next(iter(compiled.values())), 2), self.arguments.turn_ms
        )
        order = collections.deque(compiled)
        for _ in range(self.arguments.rounds):
            for variant in order:
                start = time.perf_counter()
                seconds = stack.turn(compiled[variant], result.calls)
                result.ms.setdefault(variant, []).append(round(1e3 * seconds, 5))
                state = clocks.between(start, time.perf_counter())
                if state is not None:
                    result.mhz.setdefault(variant, []).append(state.mhz)
                    result.watts.setdefault(variant, []).append(state.watts)
            order.rotate()
        line = ", ".join(f"{variant} {1e3 * timing.seconds:.3f} ms" for variant, timing in result.times.items())
        self.say(f"{case.name}: {line}")

    def fail(self, case: Case, result: CaseResult, variant: str, error: Exception) -> None:
        result.failed[variant] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.say(f"{case.name}: {variant} failed: {result.failed[variant]}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", file=sys.stderr, flush=True)


class Stack:
    """Weights and inputs of a case. Each call takes the previous call's cache, because caches are donated."""

    def __init__(self, weights: Any, inputs: Sequence[Any]) -> None:
        self.weights, self.inputs = weights, inputs
        # CPU devices deadlock if two programs with collectives are in flight.
        self.one_by_one = jax.default_backend() == "cpu"

    def call(self, step: Callable[..., Any]) -> Any:
        """Calls the program. Returns its result without caches, which may still be in flight."""
        result, cached = step(self.weights, *self.inputs)
        if len(self.inputs) > 1:
            self.inputs = [self.inputs[0], cached, *self.inputs[2:]]
        return jax.block_until_ready(result) if self.one_by_one else result

    def turn(self, step: Callable[..., Any], calls: int) -> float:
        """Average seconds of `calls` calls, until all devices are done."""
        start = time.perf_counter()
        results = [self.call(step) for _ in range(calls)]
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls


def calls(seconds: float, turn_ms: float) -> int:
    """The number of calls in a turn, if one call takes `seconds`."""
    return min(max(math.ceil(turn_ms / 1e3 / seconds), 2), 100)


def tolerance(config: LlamaConfig, tp: int) -> float:
    """Allowed error as a fraction of the largest number.

    Each layer has two sums over devices. In each sum, tp products and the result are rounded once. Errors of different
    sums add up at random. For bf16, 8 layers and TP 2 it is 3 x 2^-8 x 4, about 0.05; a missing sum gives about 1. In
    float32 the order of additions inside products matters more, so there is a lower limit.
    """
    rounding = max(float(jnp.finfo(config.dtype).eps) / 2, 2.0**-18)
    return (tp + 1) * rounding * math.sqrt(2 * config.layers)


def check(difference: float, tolerance: float) -> None:
    if not difference <= tolerance:
        raise DhelixError(f"wrong by {difference:.2g} of the largest number, allowed are {tolerance:.2g}")


if __name__ == "__main__":
    without_graphs(os.environ)  # CUDA graphs must not hold Mosaic kernels
    main()
