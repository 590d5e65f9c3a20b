"""Constants and flags that several commands share. This module does not import jax."""

from absl import flags

DEFAULT_GPU = "H200"  # used if neither a flag nor a dump names a GPU
INTERRUPTED = 130  # exit status after Ctrl-C
NO_EFFECT = (
    "--inter_bandwidth has no effect: no collective crosses nodes, or the profile has measured times of those that do"
)


def define_inter_bandwidth(values: flags.FlagValues) -> None:
    """Defines the flag `--inter_bandwidth` on `values`. The flag's unit is GB/s."""
    usual = "GB/s of each GPU between nodes if the profile has no times between nodes (default: usual for the GPU)"
    flags.DEFINE_float("inter_bandwidth", None, usual, lower_bound=1e-3, flag_values=values)
