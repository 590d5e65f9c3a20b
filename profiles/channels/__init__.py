"""Collectives and the computations beside them, as functions of channels and chunks."""
