"""Passes that shard the model states of a program: what a plan of factors says, carried out."""
