"""Reads dumps of any XLA version, damaged or not, in bounded time and memory."""
