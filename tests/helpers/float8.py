"""Products of a type that the package lacks, after one entry for the type is added; on any number of ranks.

The entry is added to the table of `pdgemm.local.arrays.dtypes` during its import; all lists derive from the table.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
from mpi4py import MPI

import pdgemm.local.arrays

ENTRY = 'ElementType("float8_e5m2fnuz", **_BOTH, sums="float32", wire="uint8", hdf5=False)'


def plant() -> None:
    """Load the table of types with one more entry, before any other module of the package."""
    path = Path(pdgemm.local.arrays.__file__).with_name("dtypes.py")
    source, before = path.read_text(), 'ElementType("float32"'
    assert source.count(before) == 1
    spec = spec_from_file_location("pdgemm.local.arrays.dtypes", path)
    assert spec
    dtypes = module_from_spec(spec)
    sys.modules[spec.name] = dtypes
    exec(compile(source.replace(before, f"{ENTRY},\n    {before}"), path, "exec"), dtypes.__dict__)
    vars(pdgemm.local.arrays)["dtypes"] = dtypes


def main() -> None:
    plant()
    from problems import NARROW, accepted  # they read the table

    from pdgemm import Batch, DistMatrix, Plan, ProcessGrid, matmul_batched, pdgemm, plan, verify

    comm, rng = MPI.COMM_WORLD, np.random.default_rng(3)
    a, b = rng.integers(-3, 4, (12, 40)), rng.integers(-3, 4, (40, 10))
    assert ("float8_e5m2fnuz", "float32") in NARROW
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(a.astype("float8_e5m2fnuz"), grid=grid, block=3)
        B = DistMatrix.from_global(b.astype("float8_e5m2fnuz"), grid=grid, block=4, root=0).redistribute(order="F")
        C = DistMatrix.empty((12, 10), grid=grid, block=2, dtype="float32")
        for algorithm, shape, layers in accepted(comm.size):
            for mover in ("auto", "ring", "ibcast"):
                C.local[...] = np.nan
                pdgemm(1, A, B, 0, C, algorithm=algorithm, shape=shape, layers=layers, mover=mover, panel_width=5)
                assert np.array_equal(C.allgather(), a @ b)  # exact: below 2^24
                assert C.report.counted == C.report.predicted
                assert C.report.extra_bytes == C.report.predicted_extra_bytes
        assert verify(C, 1, A, B).passed
        D = A @ B
        rounded = (a @ b).astype(np.float32).astype(A.dtype)
        assert D.dtype == A.dtype and np.array_equal(D.allgather(), rounded)
        assert [(A @ B.astype(x)).dtype.name for x in ("float16", "bfloat16", "float32", "complex64")] == [
            *["float32"] * 3,
            "complex64",
        ]
        moved = A.T.redistribute(block=7, order="F")
        assert moved.dtype == A.dtype and np.array_equal(moved.allgather(), a.T.astype(A.dtype))
        made = plan(A, B)
        assert Plan.from_json(made.to_json()) == made
        many = Batch.from_global(np.stack([a, -a]).astype("float8_e5m2fnuz"), comm)
        others = Batch.from_global(np.stack([b, b]).astype("float8_e5m2fnuz"), comm)
        products = matmul_batched(many, others).to_global()
        if comm.rank == 0:
            assert np.array_equal(products[0], rounded) and np.array_equal(products[1], -rounded)


if __name__ == "__main__":
    main()
