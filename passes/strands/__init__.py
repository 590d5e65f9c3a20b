"""Passes that turn a loop over micro-batches into two strands, and improve them. All of them run at stage LOWERED."""
