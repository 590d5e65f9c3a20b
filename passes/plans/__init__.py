"""Pairing plans: their data and JSON, making one of a schedule, and carrying one out."""
