"""POST_SCHEDULER passes that reorder the scheduled program, their search, and a lower bound on any order's time."""
