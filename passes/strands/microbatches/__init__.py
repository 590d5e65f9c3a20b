"""Finds or makes the loop over micro-batches of a step, or reports why there is none."""
