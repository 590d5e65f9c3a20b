"""POST_SCHEDULER passes that reorder the scheduled program, the search that they use, and an exact bound."""
