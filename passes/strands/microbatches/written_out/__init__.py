"""Finds micro-batches that a Python loop or `unroll=` unrolled, proves that they are equal, and makes them a loop."""
