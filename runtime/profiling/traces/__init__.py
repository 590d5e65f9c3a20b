"""Reads from profiler traces how long instructions and whole modules took."""
