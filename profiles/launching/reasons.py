"""Why a process should have a variable or a flag, and what is wrong with others. Data for `dhelix flags`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

REASONS: Mapping[str, str] = MappingProxyType({
    "CUDA_DEVICE_MAX_CONNECTIONS": "with one connection, kernels start in the order of their launch, so a collective "
    "starts where the schedule put it",
    "NCCL_CTA_POLICY": "2 lets NCCL use copy engines, which take no SMs from computation",
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": "copy engines need buffers in symmetric memory",
    "xla_gpu_enable_nccl_user_buffers": "NCCL reads and writes the program's buffers, without copies of its own",
    "NCCL_BUFFSIZE": "small buffers fit a processor's cache: without peer-to-peer, data pass through host memory",
    "NCCL_MIN_NCHANNELS": "more channels keep a slow link busy",
    "NCCL_MIN_P2P_NCHANNELS": "the same for all-to-alls and permutes",
    "NCCL_SOCKET_NTHREADS": "several threads for each connection, because one does not fill a network card",
    "NCCL_NSOCKS_PERTHREAD": "several TCP streams for each thread",
    "NCCL_P2P_DISABLE": "this link was asked for: GPUs reach each other through host memory",
    "xla_gpu_enable_command_buffer": "an empty value makes no CUDA graphs, so that traces name each kernel",
    "xla_gpu_graph_min_graph_size": "CUDA graphs down to single kernels: a cheaper launch",
})  # fmt: skip
"""Reasons by the name of the variable or flag."""

RENAMED: Mapping[str, str] = MappingProxyType({
    "xla_gpu_enable_async_collectives": "is gone: collectives are asynchronous",
    "xla_gpu_enable_async_all_gather": "is gone: collectives are asynchronous",
    "xla_gpu_enable_async_all_reduce": "is gone: collectives are asynchronous",
    "xla_gpu_enable_async_reduce_scatter": "is gone: collectives are asynchronous",
    "xla_gpu_graph_level": "is now xla_gpu_enable_command_buffer, a list of kinds; empty makes no graphs",
    "xla_gpu_enable_cuda_graphs": "is now xla_gpu_enable_command_buffer, a list of kinds; empty makes no graphs",
    "xla_gpu_simplify_all_fp_conversions": "is gone: leave it out",
    "xla_gpu_enable_triton_softmax_fusion": "is gone: leave it out",
    "xla_gpu_lhs_enable_gpu_async_tracker": "is gone: leave it out",
})  # fmt: skip
"""Flags of earlier versions, and what became of them."""


@dataclass(frozen=True)
class Warned:
    """A value that usually does harm.

    Attributes:
      name: the variable or flag.
      values: values that do harm; empty means any.
      why: what happens, and what to do.
      link: the link with which it does harm; "" means any.
      unless: a variable or flag (`name=value`) with which it is right; "" for none.
    """

    name: str
    values: tuple[str, ...]
    why: str
    link: str = ""
    unless: str = ""


WARNED = (
    Warned("CUDA_LAUNCH_BLOCKING", ("1",), "nothing runs at once; unset it, it is for debugging"),
    Warned(
        "NCCL_CTA_POLICY",
        ("2",),
        "copy engines need --xla_gpu_experimental_enable_nccl_symmetric_buffers=true; "
        "without it, NCCL uses its kernels",
        unless="xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
    ),
    Warned(
        "xla_gpu_experimental_enable_nccl_symmetric_buffers",
        ("true",),
        "symmetric memory alone gains nothing; add NCCL_CTA_POLICY=2, with which NCCL uses copy engines",
        unless="NCCL_CTA_POLICY=2",
    ),
    Warned("NCCL_CTA_POLICY", ("2",), "copy engines need peer-to-peer access between the GPUs", link="no-p2p"),
    Warned("NCCL_BUFFSIZE", (), "small buffers are for links through host memory; over NVLink unset it", link="nvlink"),
    Warned("NCCL_ALGO", (), "it holds for all collectives, and settings of `dhelix tune` cannot change it; unset it"),
    Warned("NCCL_PROTO", (), "it holds for all collectives, and settings of `dhelix tune` cannot change it; unset it"),
    Warned("NCCL_MAX_NCHANNELS", (), "it caps the channels of all collectives; `dhelix tune` finds a number for each"),
    Warned("NCCL_MAX_CTAS", (), "it caps the channels of all collectives; `dhelix tune` finds a number for each"),
    Warned("NCCL_DEBUG", ("INFO", "TRACE"), "NCCL logs each collective; use WARN in training"),
    Warned("xla_gpu_enable_latency_hiding_scheduler", ("false",), "XLA then hides no communication; leave it out"),
    Warned("JAX_OPTIMIZATION_LEVEL", ("O1", "1"), "it made steps slower than XLA's default (docs/research_log.md)"),
    Warned("JAX_DISABLE_JIT", ("1", "true"), "nothing is compiled, so dhelix is off"),
    Warned("JAX_DEBUG_NANS", ("1", "true"), "steps are checked operation by operation after a NaN, so dhelix is off"),
    Warned("DHELIX", ("off", "0"), "dhelix is off"),
)
"""In the order in which they are said."""
