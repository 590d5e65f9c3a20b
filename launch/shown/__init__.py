"""What several commands show: pictures, progress, units, and words for instructions."""
