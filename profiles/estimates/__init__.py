"""Times of what was not measured: from relatives, the roofline or a similar GPU; and times of pairs."""
