"""LOWERED passes on what accumulates gradients: layer by layer, and open over replicas until the last micro-batch.

    gradient_accumulation.py   a pass: added where a layer's gradient is made
    replica_sums.py            a pass: summed over replicas once a step. It finds accumulators (accumulators.py) and
                               what is a sum over replicas (partial_sums.py), and rewrites both (parts.py)
    late_reductions.py         the same where the program reduces by hand, in a shard_map

May import `passes/hlo` and `passes/analysis`.
"""
