"""What commands agree on. Nothing here imports jax."""

DEFAULT_GPU = "H200"  # where nothing says which
INTERRUPTED = 130  # the status of a command that Ctrl-C ended
