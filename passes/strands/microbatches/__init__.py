"""Finds or makes the loop over micro-batches of a step, or reports why the step has no such loop."""
