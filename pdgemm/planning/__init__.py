"""The choice of an algorithm and its grid within a memory limit, without MPI."""
