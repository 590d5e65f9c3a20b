"""`dhelix profile`: what operators and collectives of a step cost, measured, or looked up where there is no GPU."""
