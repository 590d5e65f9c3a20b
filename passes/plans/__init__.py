"""Plans: decisions about how a step runs, as data and as JSON files.

`plan_making.py` makes a plan from a scheduled program. `planned_order.py` is the pass that carries a plan out.
"""
