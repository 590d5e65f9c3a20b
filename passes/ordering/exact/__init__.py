"""Optimal orders of small bodies, and lower bounds on the time of any order. Both serve to check the search."""
