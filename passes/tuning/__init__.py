"""Settings of collectives, tuned together with what they overlap (Lagom)."""
