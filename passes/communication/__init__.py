"""Passes that change the collectives of a program: plain forms, other implementations, parts, when they reduce."""
