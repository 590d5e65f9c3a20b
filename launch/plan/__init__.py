"""`dhelix plan`: what of one strand runs with what of the other, decided without a GPU, and shown."""
