"""The programs (variants) that `strands/run.py` compares, and the launch settings that they run under.

A variant is one way to compile a train step: by XLA alone with some of its options, or with dhelix's passes. A setting
holds for a whole process: environment, XLA flags, and number of processes. Every variant can run under every setting,
so XLA gets each setting that dhelix gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from dhelix.benchmarks.strands.no_communication import NoCommunication
from dhelix.benchmarks.strands.pinned_weight_gradients import PinnedWeightGradients
from dhelix.errors import DhelixError
from dhelix.passes.communication.all_gather_decomposition import AllGatherDecomposition
from dhelix.passes.communication.gradient_reduction import GradientReduction
from dhelix.passes.communication.reduce_scatter_decomposition import ReduceScatterDecomposition
from dhelix.passes.communication.row_partition import RowPartition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.passes.ordering.intra_batch import IntraBatch
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.passes.sharding.states.parameter_gathering import ParameterGathering
from dhelix.passes.simulation.round_robin import RoundRobin
from dhelix.passes.strands.strand_duplication import PAIRINGS, StrandDuplication
from dhelix.profiles import profile
from dhelix.profiles.hardware import Hardware, describe
from dhelix.runtime.processes.launch_settings import calls_outside_graphs
from dhelix.runtime.step.collective_matmuls.jax_forms import OFF, collective_matmul_passes
from dhelix.runtime.step.pass_lists import strand_passes

_EMPTY: Mapping[str, Any] = MappingProxyType({})
GPU = "H200"
"""GPU whose profile gives the costs by default."""


@dataclass(frozen=True)
class Setting:
    """A launch setting: the environment and flags of a process.

    Attributes:
      link: link of the profile that gives the costs, one of `profiles.hardware.LINKS`.
      profiled: launch setting of that profile (`profiles.profile.SETTINGS`).
      nodes: number of processes that NCCL takes for nodes.
      gpu: GPU of that profile.
      gpus_per_node: 0 for the GPU's usual number.
    """

    name: str
    environment: Mapping[str, str] = _EMPTY
    xla_flags: tuple[str, ...] = ()
    link: str = "nvlink"
    profiled: str = "default"
    nodes: int = 1
    gpu: str = GPU
    gpus_per_node: int = 0

    @property
    def hardware(self) -> Hardware:
        return describe(self.gpu, self.link, self.gpus_per_node)

    @property
    def copy_engines(self) -> bool:
        return "NCCL_CTA_POLICY" in self.environment

    def costs(self, link: str = "") -> CostModel:
        """Costs from the shipped profile. If it has no such launch setting, the costs of `default`.

        Args:
          link: replaces the setting's own link.
        """
        return _costs(self.gpu, link or self.link, self.profiled, self.gpus_per_node)


@functools.cache
def _costs(gpu: str, link: str, profiled: str, gpus_per_node: int) -> CostModel:
    try:
        return CostModel.find(gpu, link, profiled, gpus_per_node)
    except DhelixError:
        return CostModel.find(gpu, link, "default", gpus_per_node)


_NO_P2P = {"NCCL_P2P_DISABLE": "1"}


def _as_profiled(name: str, profiled: str, environment: Mapping[str, str] = _EMPTY, **places: Any) -> Setting:
    """A profile's launch setting, but with XLA's default CUDA graphs, as users have them."""
    known = profile.SETTINGS[profiled]
    own = {**known.environment, **environment}
    return Setting(name, own, known.training_flags, profiled=profiled, **places)


def _copy_engines(connections: int) -> Setting:
    """Copy engines with `connections` CUDA connections. With one connection, a copy delays all later launches."""
    return _as_profiled(f"copy_engine{connections}", "copy-engine1", {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)})


SETTINGS: dict[str, Setting] = {
    s.name: s
    for s in (
        Setting("default"),
        _as_profiled("connections1", "connections1"),
        _as_profiled("copy_engine", "copy-engine"),
        *(_copy_engines(connections) for connections in (1, 2, 4)),
        Setting("no_command_buffers", xla_flags=profile.SETTINGS["default"].xla_flags),
        _as_profiled("command_buffers", "command-buffers"),
        _as_profiled("user_buffers", "user-buffers"),
        Setting("no_p2p", _NO_P2P, link="no-p2p"),
        _as_profiled("no_p2p_connections1", "connections1", _NO_P2P, link="no-p2p"),
        _as_profiled("no_p2p_small_buffers", "small-buffers", _NO_P2P, link="no-p2p"),
        Setting("two_nodes", link="two-nodes", nodes=2),
        _as_profiled("two_nodes_connections1", "connections1", link="two-nodes", nodes=2),
        _as_profiled("two_nodes_sockets", "sockets", link="two-nodes", nodes=2),
    )
}

_EVEN = "--xla_gpu_enable_highest_priority_async_stream=false"
SETTINGS |= {
    f"{name}_even": replace(SETTINGS[name], name=f"{name}_even", xla_flags=(*SETTINGS[name].xla_flags, _EVEN))
    for name in ("connections1", "copy_engine1", "no_p2p_small_buffers")
}
"""Under settings `*_even`, collectives' streams lose the priority over compute that XLA gives them by default."""

XLA, OURS, BOUND = "XLA", "ours", "bound"
_STREAMS = {
    "xla_gpu_experimental_enable_collective_multi_streaming": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True)
class Variant:
    """One way to compile the train step.

    Attributes:
      structure: passes that change the structure: "" for none, or a name in `_STRUCTURES`.
      order: scheduler: "xla", or a name in `_ORDERS`.
      options: XLA options for this program; the key "optimization_level" is JAX's.
      decomposed: reduce-scatters and all-gathers become all-to-alls if the profile says that this is faster. A plain
        program with all-to-alls still counts as XLA's, so XLA has every implementation that dhelix uses.
      partitioned: where one strand runs alone, chains from a gather to a scatter are split if the profile says that
        this pays.
      reduced: gradients are reduced over data-parallel replicas layer by layer if the profile says that this pays.
      communication: False replaces collectives by local copies, which gives the bound.
      guided: XLA schedules by measured times (PGLE).
      misled: dhelix's order is made for another link (no-p2p for NVLink, NVLink for the others). Shows the cost of a
        wrong profile (DHelix figure 10, arXiv 2411.15871).
      collective_matmul: form that replaces products and the collectives next to them; OFF for none.
      as_used: the decorator decides, as for its users, where to decompose collectives and where collective matmuls
        make the predicted step faster.
    """

    name: str
    structure: str = ""
    order: str = "xla"
    options: Mapping[str, Any] = field(default_factory=dict)
    decomposed: bool = False
    partitioned: bool = False
    reduced: bool = False
    communication: bool = True
    guided: bool = False
    misled: bool = False
    collective_matmul: str = OFF
    as_used: bool = False

    @property
    def kind(self) -> str:
        """XLA: without dhelix; OURS: with dhelix; BOUND: without communication, so with wrong results."""
        if not self.communication:
            return BOUND
        return OURS if self.structure or self.order != "xla" or self.collective_matmul != OFF else XLA

    @property
    def own_options(self) -> dict[str, Any]:
        """XLA options other than the one that switches CUDA graphs off."""
        return {key: value for key, value in self.options.items() if key not in _NO_GRAPHS}


def either(name: str) -> tuple[str, str]:
    """The names of a variant with and without CUDA graphs."""
    return name, f"{name}, no graphs"


_PIPELINING = {
    f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}
_COPIES = {"xla_gpu_experimental_enable_selective_memcpy_overlap": True}
_NO_SLICES = {"xla_gpu_enable_dynamic_slice_fusion": False}
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
_SKEWS = (1, 2, 3)
_GUIDED = {"xla_gpu_enable_latency_hiding_scheduler": True}
_WITH_GRAPHS: tuple[Variant, ...] = (
    Variant("plain"),
    Variant("plain, no latency hiding", options={"xla_gpu_enable_latency_hiding_scheduler": False}),
    Variant("plain, double buffering", options={"xla_gpu_enable_while_loop_double_buffering": True}),
    Variant("plain, pipelined collectives", options=_PIPELINING),
    Variant("plain, PGLE", options=_GUIDED, guided=True),
    Variant("plain, multi-streaming", options=_STREAMS),
    Variant("plain, O1", options={"optimization_level": "O1"}),
    Variant("plain, no slice fusion", options=_NO_SLICES),
    Variant("plain, overlapped copies", options=_COPIES),
    Variant("plain, no communication", communication=False),
    Variant("plain, list", order="list"),
    Variant("plain, list by profile", order="list by profile"),
    Variant("plain, intra_batch", order="intra_batch"),
    Variant("plain, decomposed", decomposed=True),
    Variant("plain, mosaic", collective_matmul="mosaic"),
    Variant("plain, hybrid", collective_matmul="hybrid"),
    Variant("plain, ring", collective_matmul="ring"),
    Variant("plain, best matmuls", collective_matmul="auto"),
    Variant("plain, intra_batch, best matmuls", order="intra_batch", collective_matmul="auto"),
    Variant("strands", "strands"),
    Variant("strands, list", "strands", "list"),
    Variant("strands, list by profile", "strands", "list by profile"),
    Variant("strands, dp", "strands", "dp"),
    Variant("strands, dp, weight gradients pinned", "strands", "dp, weight gradients pinned"),
    Variant("strands, round_robin", "strands", "round_robin"),
    Variant("strands, forward-forward, dp", "forward-forward", "dp"),
    Variant("strands, backward-backward, dp", "backward-backward", "dp"),
    Variant("strands, same-direction, dp", "same-direction", "dp"),
    Variant("strands, no slice fusion", "strands", options=_NO_SLICES),
    Variant("strands, overlapped copies", "strands", options=_COPIES),
    Variant("strands, dp, no slice fusion", "strands", "dp", options=_NO_SLICES),
    Variant("strands, decomposed", "strands", decomposed=True),
    Variant("strands, list by profile, decomposed", "strands", "list by profile", decomposed=True),
    Variant("strands, dp, decomposed", "strands", "dp", decomposed=True),
    Variant("strands, dp, best matmuls", "strands", "dp", collective_matmul="auto"),
    Variant("strands, dp, chosen matmuls", "strands", "dp", collective_matmul="auto", as_used=True),
    Variant("strands, dp for another link", "strands", "dp", misled=True),
    Variant("strands, no communication", "strands", communication=False),
    *(Variant(f"strands, dp, skewed {k}", f"skewed {k}", "dp") for k in _SKEWS),
    Variant("strands, dp, reduced by layer", "strands", "dp", reduced=True),
    Variant("strands, dp, gathered at once", "gathered at once", "dp", reduced=True),
    Variant("plain, by layer", "by layer", reduced=True),
    Variant("plain, intra_batch, by layer", "by layer", "intra_batch", reduced=True),
    Variant("plain, intra_batch, partitioned", order="intra_batch", partitioned=True),
    Variant("strands, dp, partitioned", "strands", "dp", partitioned=True),
    *(Variant(f"strands, dp, skewed {k}, partitioned", f"skewed {k}", "dp", partitioned=True) for k in _SKEWS),
    Variant("strands, not in lockstep", "not in lockstep"),
    Variant("strands, gradients stacked", "gradients stacked"),
    Variant("strands, two buffers", "two buffers"),
    Variant("strands, dp, slices together", "slices together", "dp"),
    Variant("strands, dp, decomposed, slices together", "slices together", "dp", decomposed=True),
    Variant("plain, decomposed, cuBLAS", decomposed=True, options=_CUBLAS),
    Variant("strands, dp, cuBLAS", "strands", "dp", options=_CUBLAS),
    Variant("strands, dp, decomposed, cuBLAS", "strands", "dp", decomposed=True, options=_CUBLAS),
)
_WITHOUT = tuple(replace(v, name=either(v.name)[1], options={**v.options, **_NO_GRAPHS}) for v in _WITH_GRAPHS)
_CALLS_OUTSIDE = tuple(
    replace(v, name=f"{v.name}, calls outside graphs", options={**v.options, **calls_outside_graphs({})})
    for v in _WITH_GRAPHS
    if v.collective_matmul != OFF
)
VARIANTS: dict[str, Variant] = {v.name: v for v in (*_WITH_GRAPHS, *_WITHOUT, *_CALLS_OUTSIDE)}
"""All variants by name. Each also exists without CUDA graphs, which XLA makes of runs of kernels by default.

A graph must not hold dhelix's kernels. So variants with collective matmuls also exist with graphs of everything except
custom calls."""

ESSENTIAL = (
    "plain; plain, no slice fusion; strands; strands, list by profile; strands, dp; strands, decomposed; "
    "plain, no communication; strands, no communication"
)

SCHEDULES = (
    "plain; plain, intra_batch; plain, intra_batch, best matmuls, no graphs; strands; strands, list by profile; "
    "strands, dp; strands, dp, decomposed; strands, round_robin; strands, forward-forward, dp; "
    "strands, backward-backward, dp; strands, same-direction, dp"
)
"""Every schedule that a user can choose, and the changes that a plan can add; used to check results. The decorator's
"intra_batch" has best matmuls and no graphs; "plain, intra_batch" is its order alone."""

_STRANDS = strand_passes()  # the decorator's passes that make strands; XLA chooses the order


def _less(name: str) -> tuple[Any, ...]:
    return tuple(one for one in _STRANDS if one.name != name)


def _paired(pairing: str) -> tuple[Any, ...]:
    return (StrandDuplication(pairing=pairing), *_less("strand-duplication"))


_STRUCTURES: dict[str, tuple[Any, ...]] = {
    "": (),
    "strands": _STRANDS,
    **{f"skewed {k}": strand_passes(k) for k in _SKEWS},
    "not in lockstep": _less("strand-lockstep"),
    "gradients stacked": _less("gradient-accumulation"),
    "two buffers": _less("activation-sharing"),
    "slices together": _less("slice-separation"),
    "by layer": (ParameterGathering(),),
    "gathered at once": _less("parameter-gathering"),
    **{pairing: _paired(pairing) for pairing in PAIRINGS if pairing != "forward-backward"},
}
_ORDERS: dict[str, Callable[[Hardware, CostModel], tuple[Any, ...]]] = {
    "xla": lambda hardware, model: (),
    "list": lambda hardware, model: (CollectiveSchedule(hardware),),
    "list by profile": lambda hardware, model: (CollectiveSchedule(hardware, model=model),),
    "dp": lambda hardware, model: (StrandPairing(hardware, model=model),),
    "dp, weight gradients pinned": lambda hardware, model: (
        PinnedWeightGradients(hardware, model),
        StrandPairing(hardware, model=model),
    ),
    "intra_batch": lambda hardware, model: (IntraBatch(hardware, model=model),),
    "round_robin": lambda hardware, model: (RoundRobin(hardware, model=model),),
}


def passes_of(variant: Variant, setting: Setting, devices: Sequence[Any] = ()) -> tuple[Any, ...]:
    """The passes of `variant` for a program on `devices`, with the costs of `setting`."""
    matmuls = collective_matmul_passes(devices, variant.collective_matmul, options=variant.options)
    passes = [*matmuls, *_STRUCTURES[variant.structure]]
    if variant.decomposed:
        passes += [ReduceScatterDecomposition(setting.costs("")), AllGatherDecomposition(setting.costs(""))]
    if variant.reduced:
        passes.append(GradientReduction(setting.costs("")))
    if variant.partitioned:
        passes.append(RowPartition(setting.costs("")))
    if not variant.communication:
        passes.append(NoCommunication())
    other = "no-p2p" if setting.link == "nvlink" else "nvlink"
    order = _ORDERS[variant.order]
    return (*passes, *order(setting.hardware, setting.costs(other if variant.misled else "")))


def chosen(names: str, known: Mapping[str, Any], what: str) -> list[str]:
    """Splits names at `;`, and at commas if no known name contains a comma. Raises DhelixError for unknown names."""
    if not any("," in name for name in known):
        names = names.replace(",", ";")
    found = list(dict.fromkeys(name.strip() for name in names.split(";") if name.strip()))
    if missing := [name for name in found if name not in known]:
        raise DhelixError(f"no {what} {missing[0]!r}; there are {'; '.join(known)}")
    return found
