"""The machine as a few numbers, and costs by formula.  No MPI."""
