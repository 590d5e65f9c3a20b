"""Measures how long operators, collectives and pairs of both take on the local GPUs."""
