"""Builds the program that measures operators of a compiled step, alone and in pairs."""
