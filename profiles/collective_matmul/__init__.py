"""Measured times of collective matmuls, and the choice of the fastest form from them."""
