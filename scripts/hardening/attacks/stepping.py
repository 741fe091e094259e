"""A program that computes in steps, and saves its state after each: python stepping.py STEPS KEEP."""

import sys

import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5

steps, keep = map(int, sys.argv[1:])
with ProcessGrid(MPI.COMM_WORLD) as grid:
    there = grid.comm.bcast(grid.rank == 0 and __import__("os").path.exists("state.h5"))
    if there:
        state = hdf5.load_all("state.h5", grid, {"w": {"block": 17}})
        W, M, step = state.matrices["w"], state.matrices["m"], state.attrs["step"]
    else:
        W, M = (DistMatrix.zeros((300, 200), grid=grid, block=31, dtype=dtype) for dtype in ("float64", "complex64"))
        step = 0
    rng = np.random.default_rng(grid.rank)
    while step < steps:
        W.local[...] += 1
        M.local[...] += rng.integers(9)
        step += 1
        hdf5.save_all("state.h5", {"w": W, "m": M}, attrs={"step": step}, keep=keep)
