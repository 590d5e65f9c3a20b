"""Estimates of times that were not measured: from similar operators, from a similar GPU, or from the roofline."""
