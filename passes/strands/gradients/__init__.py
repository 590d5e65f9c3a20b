"""Passes of the stage LOWERED that rewrite gradient accumulators.

    gradient_accumulation.py   a pass: adds each layer's gradient to the accumulator inside the layer loop
    replica_sums.py            a pass: sums gradients over replicas once per step. It finds accumulators
                               (accumulators.py) and sums over replicas (partial_sums.py), and rewrites both (parts.py)
    late_reductions.py         the same rewrite for programs that write their own all-reduces, in a shard_map

Modules of this folder may import `passes/hlo`, `passes/analysis` and `passes/framework`.
"""
