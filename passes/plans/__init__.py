"""Pairing plans: their data and JSON, making one from a schedule, and carrying one out."""
