"""Names of schedules; `schedules.py` says what they are. Nothing here imports jax."""

from typing import Literal

SCHEDULES = ("dp", "list", "xla", "round_robin", "forward_forward", "backward_backward", "intra_batch")
DEFAULT: Literal["dp"] = "dp"
LIMITED = ("dp", "list")
"""Schedules that take no more memory than the plain step and 3 %; the others are to be compared with, as they are."""
SKEWED = ("dp", "list", "xla", "round_robin")
"""Schedules that pair forward with backward, whose strands can be kept some layers apart."""
