"""The flags of each command, apart from what it does: `--help` and a mistyped flag import no jax."""

DEFAULT_GPU = "H200"  # where nothing says which
INTERRUPTED = 130  # the status of a command that Ctrl-C ended
