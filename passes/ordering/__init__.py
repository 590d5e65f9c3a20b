"""POST_SCHEDULER passes: strand pairing and other orders of the scheduled program, their search and its exact bound."""
