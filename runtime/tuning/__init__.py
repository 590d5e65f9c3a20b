"""Gives collectives of a running program their NCCL settings, and finds settings by measuring."""
