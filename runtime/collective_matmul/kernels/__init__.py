"""Mosaic-GPU kernels of collective matmuls, for Hopper GPUs of one process that can access each other's memory.

    hopper_gemm             the persistent GEMM that the kernels share
    gemm_tiles              how the GEMM is cut into tiles
    held_parts              stores or sums a tile while the next one is multiplied
    opaque                  values that compilers cannot compute early
    device_barrier          the devices' rendezvous inside a kernel
    gathered_rows           order and size of the rows' transfers in `all_gather_matmul`
    all_gather_matmul       pulls rows from their owners while own rows are multiplied
    split_sums              contractions that several blocks share
    owned_tiles             owners and order of the tiles in `summed_matmul`
    summed_matmul           the common part of the next two kernels: tiles are sent to their owners and summed
    matmul_reduce_scatter   sends tiles to their owners as soon as they are multiplied (DistFuse); owners sum them
    matmul_all_reduce       the same, but owners send the sums to all devices

The kernels have no derivatives, and they check only sizes, types and tiles. Callers
(`runtime/collective_matmul/form_choice.py` and the passes) must ensure the rest:
- No NCCL collective is in flight during a kernel, because a kernel holds all its SMs while it waits for its peers.
- No CUDA graph contains a kernel, because the graph would keep the peers' addresses.
"""
