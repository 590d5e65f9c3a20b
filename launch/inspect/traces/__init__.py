"""`dhelix inspect` of profiler traces: measured times instead of estimates."""
