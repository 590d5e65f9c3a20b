"""POST_SCHEDULER passes that reorder the scheduled program: strand pairing, list scheduling, search, exact bound."""
