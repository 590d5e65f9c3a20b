"""Mosaic-GPU kernels of collective matmuls."""
