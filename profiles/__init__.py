"""What things cost: hardware descriptions and cost models. Knows nothing of HLO."""
