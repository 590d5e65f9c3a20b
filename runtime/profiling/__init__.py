"""Measures how long operators and collectives take on the GPUs of a job, alone and in pairs."""
