"""Display code that several commands share: pictures, progress, units, and words for instructions."""
