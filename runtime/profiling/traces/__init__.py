"""Profiler traces: reading them, and times of instructions and whole modules out of them."""
