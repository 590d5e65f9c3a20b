"""Measured times of collective matmuls, and the choice of the fastest form (way to execute one) from these times."""
