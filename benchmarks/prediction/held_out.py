"""How well a profile predicts pairs of unseen shapes: the contention model against simpler ones.

    python benchmarks/prediction/held_out.py profiles/data/h200-nvlink.json --out held_out.json

Leaves out each operator shape in turn with all its pairs, then each collective size, then everything of one model's
train step. P is the time of a pair, and T_i and T_j are its sides' times alone. A model fitted to the remaining pairs
predicts the excess P - max(T_i, T_j) of the pairs that were left out (dhelix.benchmarks.prediction.left_out). Prints
mean absolute errors per launch setting, in us and as a fraction of max(T_i, T_j). The model is compared with the best
constant slow-down, perfect overlap (`max`) and no overlap (`sum`).
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dhelix.benchmarks.prediction.left_out import METHODS, HeldOut, evaluate
from dhelix.profiles.estimates.estimator import hardware_of
from dhelix.profiles.files import storage
from dhelix.profiles.profile import SETTINGS, Profile

_STYLES = {"best": "", "even": "yellow", "worse": "red"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="+", type=Path, help="profile files")
    parser.add_argument("--settings", default="", help="launch settings, separated by commas; all if not given")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    arguments = parser.parse_args()
    chosen = set(filter(None, arguments.settings.split(",")))
    console, written = Console(width=None if sys.stdout.isatty() else 150), {}
    for path in arguments.profiles:
        results = evaluate_profile(storage.load(path), chosen)
        written[path.stem] = [result.to_json() for result in results]
        if arguments.markdown:
            print(markdown(results))
        else:
            console.print(table(path.stem, results))
    if arguments.out:
        arguments.out.write_text(json.dumps(written, indent=1) + "\n")


def evaluate_profile(profile: Profile, settings: set[str]) -> list[HeldOut]:
    """Results of the sections named by `settings`, or of all sections if it is empty."""
    results = []
    for name in SETTINGS:
        section = profile.section(name)
        if section.pairs and (not settings or name in settings):
            results += evaluate(section, hardware_of(profile))
    return results


COLUMNS = ("setting", "left out", "pair", "shapes", "pairs", "excess us", *METHODS, "gain us", "the model is")


def cells(result: HeldOut) -> list[str]:
    """Cells of a Markdown row, with the least error in bold."""
    errors = [f"{result.seconds[m] * 1e6:.1f} ({result.relative[m]:.1%})" for m in METHODS]
    least = min(range(len(METHODS)), key=lambda n: result.seconds[METHODS[n]])
    errors[least] = f"**{errors[least]}**"
    gain = f"{result.gain * 1e6:+.1f}" + ("" if result.gain_error is None else f" ± {result.gain_error * 1e6:.1f}")
    counts = f"{result.shapes}", f"{result.pairs}", f"{result.excess * 1e6:.1f}"
    return [result.setting, result.left_out, result.roles, *counts, *errors, gain, result.verdict]


def table(title: str, results: list[HeldOut]) -> Table:
    made = Table(*COLUMNS, title=title)
    for result in results:
        made.add_row(*cells(result), style=_STYLES[result.verdict])
    return made


def markdown(results: list[HeldOut]) -> str:
    heads, *rows = (f"| {' | '.join(row)} |" for row in (COLUMNS, *map(cells, results)))
    return "\n".join([heads, "|---" * len(COLUMNS) + "|", *rows])


if __name__ == "__main__":
    main()
