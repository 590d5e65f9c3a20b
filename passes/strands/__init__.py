"""LOWERED passes: a loop over micro-batches becomes two strands, and what makes these fit together."""
