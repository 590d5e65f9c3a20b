"""Where the time and memory of a step go, and how close its operators come to what the hardware can do."""
