"""The model of a machine and closed formulas for costs.  Nothing here uses MPI."""
