"""`dhelix simulate`: time and memory of a train step on a cluster that need not exist."""
