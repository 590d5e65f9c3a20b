"""Plans for a train step at hand: how its model states are sharded."""
