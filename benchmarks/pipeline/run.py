"""Measures step times of pipelines on the GPUs of one host: two strands (W, interleaved SI) and other schedules.

    python benchmarks/pipeline/run.py --stages 2 --settings no_p2p,no_p2p_connections1 --budget_s 550 --out DIR
    python benchmarks/pipeline/run.py --stages 4 --settings default,copy_engine1 --budget_s 550 --out DIR
    python benchmarks/pipeline/run.py --stages 2 --settings no_p2p --on_paper --out DIR       # no GPU: predictions
    python benchmarks/pipeline/tables.py DIR/*.json

All variants (`variants.py`) run the same model on the same batch and GPUs. A pipeline uses stages x tensor parallelism;
some variants have no pipeline. The procedure is that of `strands/run.py`: one process for each launch setting; settings
and variants take turns; results are written after every turn; processes share autotuning results. Name the most
important variant first. The losses of the first steps are compared, and the tables report differences.

Expect several minutes for each setting. Each variant compiles (`--threads` at a time), and then runs check_steps +
rounds x steps steps.

To check that the largest model of `memory.py` fits into the GPUs' memory, run one step:

    python benchmarks/pipeline/run.py --stages 2 --layers LAYERS --variants "W, xla" --rounds 0 --check_steps 1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dhelix.benchmarks.pipeline.tables import tables
from dhelix.benchmarks.pipeline.variants import ESSENTIAL, VARIANTS
from dhelix.benchmarks.strands import run as strands
from dhelix.benchmarks.strands.variants import SETTINGS, chosen
from dhelix.errors import DhelixError

WORKER = Path(__file__).parent / "worker.py"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layers", type=int, default=16)
    made.add_argument("--tp", type=int, default=4, help="GPUs; tensor parallelism of a step without a pipeline")
    made.add_argument("--stages", type=int, default=2, help="of the pipelines, over tp / stages GPUs each")
    made.add_argument("--variants", default=ESSENTIAL, help=f"all, or of: {'; '.join(VARIANTS)}")
    made.add_argument("--traces", action="store_true", help="a traced step of each, too")
    strands.add_common_flags(made, rounds=2)
    return made


def main() -> None:
    arguments = parser().parse_args()
    try:
        complete(arguments)
        path = strands.measure(arguments, _file_name(arguments), WORKER, tables)
    except DhelixError as error:
        sys.exit(str(error))
    print(f"results in {path}")


def complete(arguments: argparse.Namespace) -> None:
    """Looks up names, and sets the options that a worker of `strands/run.py` expects.

    Raises DhelixError if the arguments are invalid.
    """
    arguments.settings = chosen(arguments.settings, SETTINGS, "setting")
    names = "; ".join(VARIANTS) if arguments.variants.strip() == "all" else arguments.variants
    arguments.variants = chosen(names, VARIANTS, "variant")
    if not arguments.variants or not arguments.settings:
        raise DhelixError("name at least one variant and one setting")
    if several := [name for name in arguments.settings if SETTINGS[name].nodes > 1]:
        raise DhelixError(f"setting {several[0]}: a pipeline's GPUs are one process here; leave it out")
    if arguments.stages < 1 or arguments.tp % arguments.stages:
        raise DhelixError(f"{arguments.stages} stages do not divide {arguments.tp} GPUs; take a divisor")
    arguments.channels, arguments.shards, arguments.unrolled, arguments.no_traces = 0, 0, False, not arguments.traces
    arguments.dp, arguments.cp, arguments.ep, arguments.capacity, arguments.sharding = 1, 1, 0, 0.0, "shard_map"
    arguments.states = None


def _file_name(arguments: argparse.Namespace) -> str:
    parts = [arguments.preset, f"l{arguments.layers}", f"pp{arguments.stages}tp{arguments.tp // arguments.stages}"]
    return "_".join(["pipeline", *parts, f"m{arguments.microbatches}", arguments.settings[0]])


if __name__ == "__main__":
    main()
