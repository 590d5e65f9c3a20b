"""Reads and writes files with measured times: profiles in dhelix's JSON format, and tables in XLA's formats."""
