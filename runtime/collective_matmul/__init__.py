"""Matmuls that hide their collective. `operations.py` is the user's interface; `form_choice.py` chooses the form."""

from dhelix.runtime.collective_matmul.operations import (
    CollectiveMatmuls,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

__all__ = ["CollectiveMatmuls", "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
