"""Implements `value_and_grad` as a loop over micro-batches, and combines the outputs of micro-batches."""
