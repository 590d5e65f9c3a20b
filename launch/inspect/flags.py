"""The flags of `dhelix inspect`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

from absl import flags

from dhelix.errors import DhelixError
from dhelix.launch.defaults import DEFAULT_GPU, check_given, check_writable, define_inter_bandwidth
from dhelix.profiles import hardware as gpus
from dhelix.profiles.profile import SETTINGS

USAGE = """\
usage: dhelix inspect DUMP_OR_TRACE [--compare OTHER] [flags]

Reads a scheduled HLO module and shows which computation hides each collective and how much of it is exposed, which
large buffers are copied inside loops, and how much memory the step needs. Nothing runs: times are estimates from a
profile of the GPU, or from a roofline if there is no profile.

DUMP is a file of --xla_dump_to (*after_optimizations.hlo.pb or .txt, gzipped or not), or its folder, in which the
largest such module is read. With --compare, DUMP is the program before a change and OTHER the program after it.

TRACE is a folder of jax.profiler.trace, or one file of it (.xplane.pb or .trace.json.gz). Its times are measured, on
all GPUs and hosts whose files lie in the folder: what is hidden and exposed, what overlap costs, how fast collectives
are, who waits for whom, and why GPUs are idle."""

AUTO, NONE = "auto", "none"
TABLES = ("step", "time", "operations", "path", "collectives", "memory", "copies", "gpus", "streams", "pauses")
"""All tables, in their order."""
ONLY_TRACES, ONLY_DUMPS = ("gpus", "streams", "pauses"), ("copies",)
"""Tables that only traces have, and tables that only dumps have."""
SHOWN = ("step", "time", "collectives", "copies", "gpus", "pauses")
"""The tables that are printed by default."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix inspect` on `values`."""
    flags.DEFINE_string("compare", None, "second dump or trace, to compare with the first", flag_values=values)
    flags.DEFINE_string(
        "program",
        None,
        "program to look at in a trace (default: the longest)",
        flag_values=values,
    )
    words = (
        "number of the GPU of a trace whose critical path, streams, pauses and picture are shown (default: the one "
        "with the longest steps; for pauses, the one that is idle longest)"
    )
    flags.DEFINE_integer("gpu", None, words, lower_bound=0, flag_values=values)
    flags.DEFINE_enum(
        "hardware",
        None,
        sorted(gpus.ALL),
        f"GPU to estimate times for (default: the dump's, or {DEFAULT_GPU} if the dump does not name one)",
        flag_values=values,
    )
    flags.DEFINE_string(
        "profile",
        AUTO,
        "source of times: auto (a shipped profile or your own, else a roofline), none (a roofline), or a profile file",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "setting", "default", list(SETTINGS), "launch setting whose times in the profile are used", flag_values=values
    )
    define_inter_bandwidth(values)
    flags.DEFINE_bool("json", False, "print everything as JSON instead of tables", flag_values=values)
    flags.DEFINE_string("png", None, "draw the timeline to this PNG file", flag_values=values)
    flags.DEFINE_string("perfetto", None, "write the timeline to this file for ui.perfetto.dev", flag_values=values)
    flags.DEFINE_string(
        "html", None, "write timeline and tables as one page for a browser to this file", flag_values=values
    )
    flags.DEFINE_list("titles", [], "titles in the picture, one for each dump", flag_values=values)
    flags.DEFINE_string("headline", "", "headline of the picture or the page", flag_values=values)
    flags.DEFINE_multi_string(
        "show",
        list(SHOWN),
        f"tables to print, with commas between them: {', '.join(TABLES)}, or all; only traces have "
        f"{', '.join(ONLY_TRACES)}, only dumps {', '.join(ONLY_DUMPS)}",
        flag_values=values,
    )
    flags.DEFINE_integer("top", 12, "largest number of rows in a table", lower_bound=1, flag_values=values)


def chosen_tables(values: flags.FlagValues) -> list[str]:
    """The tables of `--show`, which may be given several times. Raises DhelixError if one is unknown."""
    names = [name.strip() for text in values.show for name in text.split(",")]
    for name in names:
        if name not in ("all", *TABLES):
            raise DhelixError(f"--show {name}: there is no such table; give some of {', '.join(TABLES)}, or all")
    return list(TABLES) if "all" in names else names


def check(values: flags.FlagValues, arguments: list[str]) -> None:
    """Raises DhelixError if there is not one dump or trace, a path does not exist, or a file cannot be written."""
    if len(arguments) != 1:
        raise DhelixError(
            "give one dump to inspect (a file or folder of --xla_dump_to) or one profiler trace, and a second one with "
            "--compare"
        )
    check_given(
        (arguments[0], values.compare), "a file or folder of --xla_dump_to, or a profiler trace (jax.profiler.trace)"
    )
    check_writable((values.png, values.perfetto, values.html))
