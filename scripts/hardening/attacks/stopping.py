"""Products, a factorisation, a sum and a file, until the file `enough` is there: python stopping.py MOVER CHECKED."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm, redistribute
from pdgemm.io import hdf5

mover: Any = sys.argv[1]
checked = sys.argv[2] == "checked"
whole = np.random.default_rng(1).random((90, 90)) + 90 * np.eye(90)
grid = ProcessGrid(MPI.COMM_WORLD)
A = DistMatrix.from_global(whole, grid=grid, block=7)
Path(f"begun.{grid.rank}").touch()
while not grid.comm.bcast(Path("enough").exists(), root=0):
    for _ in range(5):
        C = pdgemm(1, A, A, algorithm="summa", mover=mover, check=checked)
    B = redistribute(C, block=11)
    hdf5.save("c.h5", "x", B)
    X = linalg.solve(A, hdf5.load("c.h5", "x", grid=grid, block=7))  # which is A
    assert abs(X.sum() - whole.sum()) <= 1e-8 * whole.sum()
    assert np.allclose(X.allgather(), whole)
print("right")
