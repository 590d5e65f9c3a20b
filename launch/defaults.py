"""Constants, flags and checks that several commands share. This module does not import jax."""

from collections.abc import Iterable
from pathlib import Path

from absl import flags

from dhelix.errors import DhelixError

DEFAULT_GPU = "H200"  # used if neither a flag nor a dump names a GPU
INTERRUPTED = 130  # exit status after Ctrl-C
NO_EFFECT = (
    "--inter_bandwidth has no effect: no collective crosses nodes, or the profile has measured times of those that do"
)


def define_inter_bandwidth(values: flags.FlagValues) -> None:
    """Defines the flag `--inter_bandwidth` on `values`. The flag's unit is GB/s."""
    usual = "GB/s of each GPU between nodes if the profile has no times between nodes (default: usual for the GPU)"
    flags.DEFINE_float("inter_bandwidth", None, usual, lower_bound=1e-3, flag_values=values)


def check_given(paths: Iterable[str | None], give: str) -> None:
    """Checks that files or folders exist. None is no path.

    Args:
      give: what the user should give instead.

    Raises:
      DhelixError: one of them does not exist.
    """
    for path in paths:
        if path is not None and not Path(path).exists():
            raise DhelixError(f"{path}: no such file or folder; give {give}")


def check_writable(paths: Iterable[str | None]) -> None:
    """Checks that files can be written where `paths` say. None and "" are no paths.

    Raises:
      DhelixError: the folder of one of them does not exist.
    """
    for path in filter(None, paths):
        if not Path(path).absolute().parent.is_dir():
            raise DhelixError(f"cannot write {path}: give a file in a folder that exists")
