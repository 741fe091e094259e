"""Programs whose ranks are killed or stopped: python programs.py NAME ARGUMENTS, in the folder of a trial."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from time import sleep, time
from typing import Any

import numpy as np
from mpi4py import MPI

import pdgemm
from pdgemm import DistMatrix, ProcessGrid, linalg, redistribute
from pdgemm.io import hdf5


def stepping(steps: str, keep: str) -> None:
    """Compute in steps, and save the state after each."""
    with ProcessGrid(MPI.COMM_WORLD) as grid:
        if grid.comm.bcast(Path("state.h5").exists()):
            state = hdf5.load_all("state.h5", grid, {"w": {"block": 17}})
            W, M, step = state.matrices["w"], state.matrices["m"], state.attrs["step"]
        else:
            types: tuple[Any, Any] = ("float64", "complex64")
            W, M = (DistMatrix.zeros((300, 200), grid=grid, block=31, dtype=dtype) for dtype in types)
            step = 0
        rng = np.random.default_rng(grid.rank)
        while step < int(steps):
            W.local[...] += 1
            M.local[...] += rng.integers(9)
            step += 1
            hdf5.save_all("state.h5", {"w": W, "m": M}, attrs={"step": step}, keep=int(keep))


def stopping(mover: Any, checked: str) -> None:
    """Compute products, a factorisation and a sum, and write a file, until the file `enough` exists."""
    whole = np.random.default_rng(1).random((90, 90)) + 90 * np.eye(90)
    grid = ProcessGrid(MPI.COMM_WORLD)
    A = DistMatrix.from_global(whole, grid=grid, block=7)
    Path(f"begun.{grid.rank}").touch()
    while not grid.comm.bcast(Path("enough").exists(), root=0):
        for _ in range(5):
            C = pdgemm.pdgemm(1, A, A, algorithm="summa", mover=mover, check=checked == "checked")
        B = redistribute(C, block=11)
        hdf5.save("c.h5", "x", B)
        X = linalg.solve(A, hdf5.load("c.h5", "x", grid=grid, block=7))  # X is A
        assert abs(X.sum() - whole.sum()) <= 1e-8 * whole.sum()
        assert np.allclose(X.allgather(), whole)
    print("right")


def surviving(mover: Any, steps: str, seconds: str, saved: str) -> None:
    """Compute X := A X + B by the surviving ranks; wait in each step, and store X after every SAVED steps."""

    def make(grid: ProcessGrid) -> dict[str, Any]:
        A = hdf5.load("in.h5", "a", grid=grid, block=(37, 64))
        B = hdf5.load("in.h5", "b", grid=grid, block=50)
        return {"A": A, "B": B, "X": B.T.copy().T, "k": 0}

    def step(state: dict[str, Any]) -> dict[str, Any]:
        X = pdgemm.pdgemm(1.0, state["A"], state["X"], 1.0, state["B"].copy(), mover=mover)
        sleep(float(seconds))
        k = state["k"] + 1
        if k % int(saved) == 0 or k == int(steps):
            hdf5.save("out.h5", "x", X)
        return {**state, "X": X, "k": k}

    with pdgemm.resilient() as r:
        Path(f"begun.{r.comm.rank}").touch()
        made = r.run(make, step, lambda state: state["k"] == int(steps))
    assert np.isfinite(made["X"].local).all()
    if r.comm.rank == 0:
        print("recovered:", *(f"{len(x.lost)}, {'memory' if x.memory else 'files'};" for x in r.recoveries))


def training(options: str, rank: str, share: str) -> None:
    """Train a model; in the last step a rank raises an exception, when it has made a share of the calls of a step."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "helpers"))
    import torch
    from plain_models import GPT, gpt_table, own_samples, tokens

    from pdgemm.training import Mesh, distribute

    torch.set_num_threads(1)
    how = json.loads(options)
    mesh = Mesh(**how.pop("mesh"))
    run = distribute(GPT(), mesh, gpt_table(), blocks="blocks", **how)
    run.optimizer(torch.optim.AdamW, lr=1e-2)
    calls, last = 0, -1

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if code.co_flags & CO_GENERATOR:  # Python ignores an exception in a generator that it closes
            return
        if event == "call" and "/pdgemm/training/" in code.co_filename and code.co_name != "step":
            calls += 1
            if calls == last:
                Path("raised").write_text(str(time()))
                raise ValueError("a drawn failure")

    for step in range(3):
        if mesh.rank == int(rank) and step:
            calls, last = 0, (-1 if step == 1 else 1 + int(float(share) * calls))
            sys.setprofile(count)
        run.step(*own_samples(mesh, tokens(step)))


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {x.__name__: x for x in (stepping, stopping, surviving, training)}
    programs[sys.argv[1]](*sys.argv[2:])
