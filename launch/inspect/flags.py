"""The flags of `dhelix inspect`, and the text that `--help` prints above them. Imports no jax."""

from __future__ import annotations

from absl import flags

from dhelix.launch.defaults import DEFAULT_GPU, define_inter_bandwidth
from dhelix.profiles import hardware as gpus
from dhelix.profiles.profile import SETTINGS

USAGE = """\
usage: dhelix inspect DUMP [--compare OTHER] [flags]

Reads a scheduled HLO module and says, for each collective, what lies under it and how much of it is exposed;
which large buffers are copied inside loops; and how much memory the step needs. Nothing runs: times are
estimates, of a profile of the GPU where there is one, else of a roofline.

DUMP is a file of --xla_dump_to (*after_optimizations.hlo.pb or .txt, packed by gzip or not), or its folder: then the
largest such module is taken. With --compare, DUMP is the program before and OTHER the one after."""

AUTO, NONE = "auto", "none"


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags on `values`."""
    flags.DEFINE_string("compare", None, "a second dump, shown beside the first", flag_values=values)
    flags.DEFINE_enum(
        "hardware",
        None,
        sorted(gpus.ALL),
        f"GPU that times are estimated for (default: that of the dump; {DEFAULT_GPU} where nothing says)",
        flag_values=values,
    )
    flags.DEFINE_string(
        "profile",
        AUTO,
        "where times come from: auto (a profile of the GPU, shipped or the user's own, else a roofline), none (a"
        " roofline), or a profile's file",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "setting", "default", list(SETTINGS), "the launch setting of the profile that counts", flag_values=values
    )
    define_inter_bandwidth(values)
    flags.DEFINE_bool("json", False, "print everything as JSON instead of tables", flag_values=values)
    flags.DEFINE_string("png", None, "write the timeline as a picture to this file", flag_values=values)
    flags.DEFINE_string("perfetto", None, "write the timeline for ui.perfetto.dev", flag_values=values)
    flags.DEFINE_list("titles", [], "titles for the picture, one for each dump", flag_values=values)
    flags.DEFINE_string("headline", "", "headline of the picture", flag_values=values)
    flags.DEFINE_integer("top", 12, "how many rows a table shows", lower_bound=1, flag_values=values)
