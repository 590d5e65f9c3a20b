"""`dhelix plan`: decides without a GPU which operators of the two strands run together, and prints this plan."""
