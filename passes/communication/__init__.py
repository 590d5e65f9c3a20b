"""Passes that change a program's collectives: canonical forms, replacements, splitting, and earlier reductions."""
