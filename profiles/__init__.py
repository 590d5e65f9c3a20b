"""Times of operators and collectives: descriptions of GPUs, measured profiles, and estimates. No module reads HLO."""
