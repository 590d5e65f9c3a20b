"""Orders that no other order beats, and bounds that say so: the checks of the search."""
