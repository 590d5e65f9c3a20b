"""Reads profiler traces, and the times of instructions and whole modules in them."""
