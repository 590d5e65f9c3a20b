"""`dhelix inspect`: reads a step that XLA dumped, and shows what its collectives overlap with."""
