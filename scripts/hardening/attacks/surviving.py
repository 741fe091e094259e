"""X := A X + B, many times, by the ranks that are left: python surviving.py MOVER STEPS SECONDS SAVED.

It waits for so many SECONDS in each step, and stores X in out.h5 after each SAVED steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np

import pdgemm
from pdgemm import ProcessGrid
from pdgemm.io import hdf5

mover: Any = sys.argv[1]
steps, seconds, saved = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])


def make(grid: ProcessGrid) -> dict[str, Any]:
    A = hdf5.load("in.h5", "a", grid=grid, block=(37, 64))
    B = hdf5.load("in.h5", "b", grid=grid, block=50)
    return {"A": A, "B": B, "X": B.T.copy().T, "k": 0}


def step(state: dict[str, Any]) -> dict[str, Any]:
    X = pdgemm.pdgemm(1.0, state["A"], state["X"], 1.0, state["B"].copy(), mover=mover)
    sleep(seconds)
    k = state["k"] + 1
    if k % saved == 0 or k == steps:
        hdf5.save("out.h5", "x", X)
    return {**state, "X": X, "k": k}


with pdgemm.resilient() as r:
    Path(f"begun.{r.comm.rank}").touch()
    made = r.run(make, step, lambda state: state["k"] == steps)
assert np.isfinite(made["X"].local).all()
if r.comm.rank == 0:
    print("recovered:", *(f"{len(x.lost)}, {'memory' if x.memory else 'files'};" for x in r.recoveries))
