"""The flags of `dhelix flags`, and the text that `--help` prints above them. This module does not import jax."""

from __future__ import annotations

from absl import flags

from dhelix.profiles import hardware
from dhelix.profiles.profile import SETTINGS

USAGE = """\
usage: dhelix flags [flags]

Prints the environment variables and XLA flags with which a job is usually fastest, each with its reason, and what they
were worth when they were measured. With --check, looks at those of this shell instead: what this jaxlib does not know,
what was renamed, and what usually does harm.

  dhelix flags --link no-p2p
  eval "$(dhelix flags --link no-p2p --shell)"
  dhelix flags --check"""


def define_flags(values: flags.FlagValues) -> None:
    """Defines all flags of `dhelix flags` on `values`."""
    flags.DEFINE_enum("link", None, list(hardware.LINKS), "link between the GPUs (default: nvlink, or no-p2p if "
                      "NCCL_P2P_DISABLE is set)", flag_values=values)  # fmt: skip
    words = "launch setting (default: the one that is usually fastest for the link)"
    flags.DEFINE_enum("setting", None, list(SETTINGS), words, flag_values=values)
    flags.DEFINE_bool("shell", False, "print shell commands alone", flag_values=values)
    words = "check the variables and XLA_FLAGS of this shell; exit status 1 if something is wrong"
    flags.DEFINE_bool("check", False, words, flag_values=values)
    flags.DEFINE_bool("json", False, "print everything as JSON", flag_values=values)
