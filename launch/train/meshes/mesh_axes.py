"""The sizes of mesh axes, from the flag `--mesh`."""

from __future__ import annotations

import math

import jax

from dhelix.errors import DhelixError


def mesh_axes(text: str, devices: int, kv_heads: int, pp: int = 1, experts: int = 0) -> dict[str, int]:
    """The sizes of the axes dp, cp and tp on each of `pp` stages, from a text such as `dp=2,tp=4`; with experts, ep.

    If the text leaves out dp or tp, this axis takes the remaining devices. If it leaves out both, dp takes them. If it
    leaves out cp or ep, they are 1. If the text is empty, one axis gets the largest possible size. Without experts,
    this axis is tp, whose size must divide the devices of a stage and the key-value heads. With experts, this axis is
    ep, whose size must divide the devices and the experts.

    Raises:
      DhelixError: the text is malformed, or the mesh needs more devices than there are.
    """
    axes = parsed_axes(text, experts > 0)
    if devices % pp and not {"dp", "tp"} <= set(axes):
        raise DhelixError(f"--pp {pp} does not divide the {devices} devices; give a number that does")
    of_stage = devices // pp
    if not axes and experts:
        axes["ep"] = math.gcd(of_stage, experts)
    elif not axes:
        axes["tp"] = math.gcd(of_stage, kv_heads)
    rest = max(1, of_stage // axes.get("ep", 1) // axes.get("cp", 1))
    dp = axes.get("dp", max(1, rest // axes.get("tp", 1)))
    tp = axes.get("tp", max(1, rest // dp))
    found = {"dp": dp, **({"ep": axes.get("ep", 1)} if experts else {}), "cp": axes.get("cp", 1), "tp": tp}
    size = math.prod(found.values())
    if size > of_stage or (size < of_stage and jax.process_count() > 1):
        more = "" if jax.process_count() > 1 else "; to try it out on N CPU devices, give --cpu_devices N"
        said = {"pp": pp} | found
        mesh = " x ".join(f"{name} {size}" for name, size in said.items() if size > 1 or name not in ("pp", "cp"))
        raise DhelixError(f"a mesh of {mesh} needs {pp * size} devices, but there are {devices}{more}")
    return found


def parsed_axes(text: str, experts: bool) -> dict[str, int]:
    """The sizes of the axes that a text names. Raises DhelixError if it is malformed."""
    names = ("dp", "ep", "cp", "tp") if experts else ("dp", "cp", "tp")
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in names or name in axes or not size.isdecimal() or int(size) < 1:
            more = {"pp": "; the number of pipeline stages is --pp"}
            more |= {} if experts else {"ep": "; ep is for models with experts"}
            example = "dp=2,ep=4,tp=1" if experts else "dp=2,tp=4"
            raise DhelixError(
                f"--mesh {text} is not valid; give sizes of the axes {', '.join(names[:-1])} and {names[-1]}, for "
                f"example {example}{more.get(name, '')}"
            )
        axes[name] = int(size)
    return axes
