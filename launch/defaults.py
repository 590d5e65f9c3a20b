"""Constants and flags that several commands share. Imports no jax."""

from absl import flags

DEFAULT_GPU = "H200"  # used if neither a flag nor a dump names a GPU
INTERRUPTED = 130  # exit status after Ctrl-C
NO_EFFECT = "--inter_bandwidth changes nothing: no collective goes between nodes, or the profile says what these take"


def define_inter_bandwidth(values: flags.FlagValues) -> None:
    """Defines `--inter_bandwidth` (GB/s) on `values`."""
    usual = "GB/s of each GPU between nodes, where the profile has nothing of them (default: usual for the GPU)"
    flags.DEFINE_float("inter_bandwidth", None, usual, lower_bound=1e-3, flag_values=values)
