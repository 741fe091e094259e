"""Schedules of factorisations whose pivots decide what a panel is: a plan has random pivots, a run those of the run."""
