"""Interleaves steps of programs that nobody decorated: the part of `dhelix run` that lives in the user's process."""
