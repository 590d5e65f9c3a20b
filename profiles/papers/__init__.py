"""Facts that papers published: their clusters, and the numbers that they measured."""
