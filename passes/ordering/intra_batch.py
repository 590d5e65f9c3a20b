"""Applies the search of `strand_pairing.py` to one strand: hides communication inside one micro-batch by order alone.

The paper's intra-batch baseline (MegaScale; DHelix section 6.1, arXiv 2411.15871) also splits matrix products, which no
reordering can do. So `schedule="intra_batch"` first makes collective matmuls, which split products
(`runtime/step/pass_lists.py`). Legality and memory limits are those of `order_rules.py`.
"""

from dataclasses import dataclass

from dhelix.passes.ordering.strand_pairing import StrandPairing


@dataclass(frozen=True)
class IntraBatch(StrandPairing):
    """Treats all operators as one strand. The attributes are the same as in `StrandPairing`."""

    name = "intra-batch"
    strands = 1
