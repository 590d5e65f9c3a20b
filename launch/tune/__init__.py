"""`dhelix tune`: tunes the collectives of a train step on this machine's GPUs."""
