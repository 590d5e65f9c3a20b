"""Measures the cost of operators, collectives and pairs of them on the local GPUs."""
