#!/usr/bin/env python3
"""How much code a reader must follow: calls and changes of module in a product, a factorisation and a product of files.

    . scripts/env.sh; python scripts/benchmarks/trace_calls.py
    mpiexec -n 2 python scripts/benchmarks/trace_calls.py

The product is 64 x 48 x 32 and the matrix has order 64, in float64.  An earlier product of other shapes loads modules
and grids.  A move is a change of module by a call or a return; generator expressions are left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import pdgemm
from pdgemm import DistMatrix, ProcessGrid, io, linalg

PACKAGE = Path(pdgemm.__file__).resolve().parent
ROOTS = (PACKAGE, PACKAGE.parent / "grids", PACKAGE.parent / "io")
LEFT_OUT = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


class Walk:
    """Counts the calls of functions of the package, and the moves between its modules."""

    def __init__(self) -> None:
        self.calls = self.moves = self.depth = self.deepest = 0
        self.functions, self.modules, self._at = Counter[str](), Counter[str](), [""]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if (
            event not in ("call", "return")
            or code.co_name in LEFT_OUT
            or not any(path.is_relative_to(x) for x in ROOTS)
        ):
            return
        if event == "call":
            self.calls += 1
            self.functions[f"{path.stem}.{code.co_qualname}"] += 1
            self.modules[path.stem] += 1
            self.moves += self._at[-1] not in ("", code.co_filename)
            self._at.append(code.co_filename)
            self.deepest = max(self.deepest, len(self._at) - 1)
        else:
            left = self._at.pop()
            self.moves += self._at[-1] not in ("", left)


def walked(call: Callable[[], Any]) -> Walk:
    walk = Walk()
    sys.setprofile(walk)
    try:
        call()
    finally:
        sys.setprofile(None)
    return walk


def main() -> None:
    comm = MPI.COMM_WORLD
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with ProcessGrid(comm) as grid, TemporaryDirectory() as folder:
        paths = comm.bcast([str(Path(folder) / f"{name}.h5") for name in "abc"])
        first = [DistMatrix.random(shape, grid=grid) for shape in ((20, 30), (30, 10))]
        _ = first[0] @ first[1]
        linalg.cholesky(DistMatrix.eye(20, grid=grid))
        A, B = DistMatrix.random((64, 32), grid=grid), DistMatrix.random((32, 48), grid=grid)
        S = DistMatrix.from_global(64 * np.eye(64) + 1, grid=grid)
        for path, X in zip(paths, (A, B)):
            io.hdf5.save(path, "x", X)
        files = [(path, "x") for path in paths]
        rows = {
            "pdgemm(1, A, B), first": walked(lambda: pdgemm.pdgemm(1, A, B)),
            "pdgemm(1, A, B), again": walked(lambda: pdgemm.pdgemm(1, A, B)),
            "linalg.cholesky(A)": walked(lambda: linalg.cholesky(S)),
        }
        pdgemm.multiply_files(*files, grid=grid)
        rows["multiply_files, again"] = walked(lambda: pdgemm.multiply_files(*files, grid=grid))
        if comm.rank == 0:
            print(f"{'':24} {'calls':>6} {'functions':>9} {'modules':>7} {'moves':>6} {'depth':>6}")
            for name, walk in rows.items():
                numbers = (
                    f"{walk.calls:6} {len(walk.functions):9} {len(walk.modules):7} {walk.moves:6} {walk.deepest:6}"
                )
                print(f"{name:24} {numbers}")
                for function, count in walk.functions.most_common(most):
                    print(f"    {count:5} {function}")


if __name__ == "__main__":
    main()
