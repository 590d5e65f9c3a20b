"""`dhelix run`: runs a training program that nobody decorated."""
