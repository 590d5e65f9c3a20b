"""What holds of a program whatever is done with it: collectives, buffers, where dimensions go, what is replicated."""
