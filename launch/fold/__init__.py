"""`dhelix fold`: shows how a pipeline distributes layers and micro-batches over stages, and how long a step takes."""
