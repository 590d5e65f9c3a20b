"""Passes that change a program's collectives: they canonicalize, replace, split, separate or move them."""
