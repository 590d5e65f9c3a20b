"""`dhelix fold`: how layers and micro-batches lie on the stages of a pipeline, and what that costs."""
