"""Profiles as files: their text, the codec that checks it, the folders that are searched, and XLA's tables."""
