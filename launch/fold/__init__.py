"""`dhelix fold`: shows how layers and micro-batches are distributed over pipeline stages, and what that costs."""
