"""Times of what was not measured: from relatives, from the roofline, from a GPU that is alike; and of pairs."""
