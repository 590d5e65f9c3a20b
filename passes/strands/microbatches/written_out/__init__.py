"""Finds micro-batches that Python or `unroll=` unrolled, proves that they are equal, and rolls them into a loop."""
