"""LOWERED passes on gradient accumulators: accumulate layer by layer, and sum over replicas after the last micro-batch.

    gradient_accumulation.py   a pass: adds each layer's gradient to the accumulator where it is made
    replica_sums.py            a pass: sums gradients over replicas once per step. It finds accumulators
                               (accumulators.py) and sums over replicas (partial_sums.py), and rewrites both (parts.py)
    late_reductions.py         the same for programs that reduce by hand, in a shard_map

May import `passes/hlo` and `passes/analysis`.
"""
