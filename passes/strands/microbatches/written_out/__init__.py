"""Micro-batches that Python or `unroll=` wrote out: found, proved equal, and put into a loop."""
