"""Plans as data and as JSON files, a function that makes a plan from a schedule, and a pass that carries a plan out."""
