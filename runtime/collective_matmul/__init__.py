"""Matmuls that overlap with their collective. `operations.py` has the user's functions.

A form is one way to run such a matmul. `form_choice.py` chooses the form.
"""

from dhelix.runtime.collective_matmul.operations import (
    CollectiveMatmuls,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

__all__ = ["CollectiveMatmuls", "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
