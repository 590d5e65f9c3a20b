"""The search of `strand_pairing.py` on a program without strands: what order alone hides inside one micro-batch.

The paper's intra-batch baseline (MegaScale; DHelix section 6.1) also splits products, which no order does: collective
matmuls do, and `schedule="intra_batch"` has them run before (`runtime/step/pass_lists.py`). Legality and memory are
as for any order (`order_rules.py`).
"""

from dataclasses import dataclass

from dhelix.passes.ordering.strand_pairing import StrandPairing


@dataclass(frozen=True)
class IntraBatch(StrandPairing):
    """All operators as one strand; attributes as of `StrandPairing`."""

    name = "intra-batch"
    strands = 1
