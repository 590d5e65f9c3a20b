"""Measuring on the GPUs at hand what operators, collectives and pairs of them cost."""
