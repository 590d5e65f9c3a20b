"""LOWERED passes that turn a loop over micro-batches into two strands, and that prepare or complete this."""
