"""Sharding of model states: over how many devices parameters, gradients and optimizer states are split (AMSP)."""
