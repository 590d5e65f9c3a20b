"""Estimates of times that were not measured, from similar operators, a similar GPU or the roofline."""
