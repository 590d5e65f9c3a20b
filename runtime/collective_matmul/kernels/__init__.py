"""Mosaic-GPU kernels of collective matmuls, for Hopper GPUs of one process that reach each other's memory.

    hopper_gemm             the persistent GEMM that they share
    gemm_tiles              how it is cut
    held_parts              what is done about a tile while the next one is multiplied
    opaque                  values that compilers shall not compute before they are needed
    gathered_rows           how rows come to the next one
    all_gather_matmul       rows are pulled from their owners while own rows are multiplied
    split_sums              contractions that several blocks share
    owned_tiles             whose tile is whose in the next two, and in which order they come
    summed_matmul           what these two share: tiles are sent to their owners and summed
    matmul_reduce_scatter   tiles go to their owners as soon as they are multiplied (DistFuse), and are summed there
    matmul_all_reduce       the same, and sums go back to all

They are forward functions, and check sizes alone. What else they need is the caller's to see to, as
`runtime/collective_matmul/form_choice.py` and the passes do: no collective of NCCL in flight beside them, as they hold
all SMs while they wait for their peers, and no CUDA graph that holds them, which would keep their peers' addresses.
"""
