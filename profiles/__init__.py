"""Costs: hardware descriptions, measured profiles and cost models. This package knows nothing of HLO."""
