"""Finds the loop over micro-batches that a step has, or says why there is none."""
