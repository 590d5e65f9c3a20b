"""Matmuls whose collective runs beside them: `operations.py` is what users call, `form_choice.py` decides how."""

from dhelix.runtime.collective_matmul.operations import (
    CollectiveMatmuls,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

__all__ = ["CollectiveMatmuls", "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
