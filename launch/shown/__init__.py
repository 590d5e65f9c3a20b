"""Code for the output of several commands: pictures, progress, units, and words for instructions."""
