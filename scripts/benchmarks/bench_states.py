#!/usr/bin/env python3
"""Files of many matrices, `save_all` and `load_all`, beside one matrix after the other.  Run under mpiexec.

    mpiexec -n 2 python scripts/benchmarks/bench_states.py [--folder DIR]
    python scripts/benchmarks/bench_states.py --cases 8x1448

A case is a number of square matrices and their order; those of more than 724 rows have more than 2^19 elements, and are
written by all ranks.  Medians of repeats in turns: `save` writes a file for each matrix, and `load` reads one matrix of
the common file after the other, both with checksums.  Files are in the page cache, and on the disk when they are saved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5
from pdgemm.tools.calibrate.place import in_turns


def works_of(number: int, order: int, place: Path, grid: ProcessGrid) -> dict[str, list[Callable[[], object]]]:
    """Return what is compared: all matrices at once, and one after the other."""
    matrices = {f"x{at}": DistMatrix.random((order, order), grid=grid, seed=at) for at in range(number)}
    path = place / f"{number}x{order}.h5"
    return {
        "save": [
            lambda: hdf5.save_all(path, matrices),
            lambda: [hdf5.save(place / f"{name}.h5", "x", x) for name, x in matrices.items()],
        ],
        "load": [
            lambda: hdf5.load_all(path, grid),
            lambda: [hdf5.load(path, name, grid, verify=True) for name in matrices],
        ],
    }


@click.command()
@click.option("--cases", default="100x32,4x1448", show_default=True, help="NUMBERxORDER of the matrices, several.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--folder", type=click.Path(exists=True), help="Where the files are; default: a temporary folder.")
def main(cases: str, repeats: int, folder: str | None) -> None:
    """Print a line for each case: the seconds of all matrices at once, one after the other, and their ratio."""
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory(dir=folder) as own, ProcessGrid(comm) as grid:
        place = Path(comm.bcast(own))
        for number, order in (map(int, case.split("x")) for case in cases.split(",")):
            for what, works in works_of(number, order, place, grid).items():
                at_once, alone = in_turns(comm, works, repeats)
                if comm.rank == 0:
                    ratio = f"{alone / at_once:.2f} times as fast"
                    print(f"{what} {number} of {order} x {order}: {at_once:.3f} s, alone {alone:.3f} s, {ratio}")
        comm.Barrier()  # until no rank has a file open in the folder


if __name__ == "__main__":
    main()
