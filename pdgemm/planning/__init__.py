"""Which algorithm, on which grid, within which memory.  No MPI."""
