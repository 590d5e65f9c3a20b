"""Times of operators and collectives: descriptions of GPUs, measured profiles and estimates. This code uses no HLO."""
