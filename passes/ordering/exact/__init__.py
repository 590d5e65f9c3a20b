"""Optimal orders of small bodies and lower bounds on the time of any order, to check the search."""
