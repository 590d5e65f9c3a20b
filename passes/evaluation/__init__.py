"""What a program and a schedule of it cost: keys into profiles, times of operators, the timeline."""
