"""What commands agree on. Nothing here imports jax."""

from absl import flags

DEFAULT_GPU = "H200"  # where nothing says which
INTERRUPTED = 130  # the status of a command that Ctrl-C ended
NO_EFFECT = "--inter_bandwidth changes nothing: no collective goes between nodes, or the profile says what these take"


def define_inter_bandwidth(values: flags.FlagValues) -> None:
    usual = "GB/s of each GPU between nodes, where the profile has nothing of them (default: usual for the GPU)"
    flags.DEFINE_float("inter_bandwidth", None, usual, lower_bound=1e-3, flag_values=values)
