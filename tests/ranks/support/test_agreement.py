"""Ranks that pass different arguments, or call different functions, all raise the same exception."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import pdgemm
from pdgemm.errors import DTypeError, GridError, PdgemmError
from pdgemm.io import hdf5
from pdgemm.support.agreement import _disagreement

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]
EVERYWHERE = (slice(None), slice(None))


def boom(*_: object) -> None:
    raise ValueError("boom")


Act = Callable[[Any], object]
# by name: the call of all ranks but one
USUAL: dict[str, Act] = {
    "gemm": lambda x: x.gemm(1, x.A, x.B),
    "gemm with C": lambda x: x.gemm(1, x.A, x.B, 0, x.C),
    "plan": lambda x: x.pdgemm.plan(x.A, x.B),
    "execute": lambda x: x.plan.execute(x.A, x.B, x.C),
    "redistribute": lambda x: x.A.redistribute(x.C),
    "redistribute, options": lambda x: x.A.redistribute(block=2),
    "to_global": lambda x: x.A.to_global(root=0),
    "set": lambda x: x.A.__setitem__(EVERYWHERE, 1.0),
    "set to a matrix": lambda x: x.A.__setitem__(EVERYWHERE, x.B),
    "set to an array": lambda x: x.A.__setitem__(1, np.ones(12)),
    "allclose": lambda x: x.A.allclose(x.B),
    "norm": lambda x: x.A.norm(),
    "norm of a tall one": lambda x: x.tall.norm(),
    "from_global": lambda x: x.deal(root=0),
    "from_global everywhere": lambda x: x.deal(),
    "random": lambda x: x.random(),
    "verify": lambda x: x.pdgemm.verify(x.C, 1, x.A, x.B, 1, x.C),
    "load": lambda x: x.load(),
    "save": lambda x: x.save(),
    "grids": lambda x: x.pdgemm.ProcessGrid(x.comm),
    "batch": lambda x: x.pdgemm.Batch.from_local(np.ones((1, 2, 2)), x.comm),
}
# (name in USUAL, the deviating call, a part of the message)
CASES: list[tuple[str, Act, str]] = [
    ("gemm", lambda x: x.gemm(1, x.A, x.B, progress=boom), "boom"),
    ("gemm", lambda x: x.gemm(1, None, x.B), "A must be a DistMatrix, got NoneType"),
    ("gemm", lambda x: x.gemm(1, x.A[:5], x.B), "pdgemm, op(A) 5 x 12 in blocks of "),
    ("gemm", lambda x: x.gemm(1, x.A, x.B.T), "of float64 in F order"),
    ("gemm", lambda x: x.gemm(1, x.freed, x.B), "has been freed"),
    ("gemm with C", lambda x: x.gemm(1, x.A, x.B), "C=None"),
    ("gemm with C", lambda x: x.gemm(1, x.A, x.B, 0, x.C, progress=boom), "boom"),
    ("gemm with C", lambda x: x.gemm(1, x.A.local, 3, 0, x.C), "A must be a DistMatrix, got ndarray"),
    ("gemm with C", lambda x: x.gemm(1, x.A, x.freed, 0, x.C), "has been freed"),
    ("plan", lambda x: x.pdgemm.plan("A", x.B), "A must be a DistMatrix"),
    ("execute", lambda x: x.plan.prepare(x.A, x.B, x.C), "prepare"),
    ("execute", lambda x: x.plan.execute(None, x.B, x.C), "A must be a DistMatrix"),
    ("execute", lambda x: x.plan.execute(x.A, x.B, x.C, alpha=[[1], [1, 2]]), "alpha must be a number, got list"),
    ("redistribute", lambda x: x.A.redistribute(), "out=None"),
    ("redistribute", lambda x: x.pdgemm.redistribute(0, x.C), "X must be a DistMatrix, got int"),
    ("redistribute, options", lambda x: x.A.redistribute(block=3), "redistribute, to 12 x 12 in blocks of 3 x 3"),
    ("redistribute, options", lambda x: x.A.redistribute(grid="grid"), "grid must be a ProcessGrid"),
    ("redistribute, options", lambda x: x.A.redistribute(grid=x.freed.grid), "has been freed"),
    ("to_global", lambda x: x.A.to_global(root=1), "to_global, 1"),
    ("to_global", lambda x: x.A.to_global(root=99), "root 99 is not a rank"),
    ("to_global", lambda x: x.A.to_global(root="0"), "root is a whole number"),
    ("to_global", lambda x: x.A.allgather(), "allgather"),
    ("set", lambda x: x.A.__setitem__(EVERYWHERE, x.B), "to a matrix"),
    ("set", lambda x: x.A.__setitem__(EVERYWHERE, 2.0), "2.0"),
    ("set", lambda x: x.A.__setitem__("x", 1.0), "a submatrix is"),
    ("set to a matrix", lambda x: x.A.__setitem__(EVERYWHERE, np.ones(4)), "an array of shape (4,)"),
    ("set to a matrix", lambda x: x.A.__setitem__(EVERYWHERE, x.freed), "has been freed"),
    ("set to an array", lambda x: x.A.__setitem__(1, np.zeros(12)), "elements of checksum"),
    ("allclose", lambda x: x.A.allclose(x.B.local), "cannot be broadcast"),
    ("allclose", lambda x: x.A.allclose(x.B, rtol=[]), ""),
    ("allclose", lambda x: x.A.norm(), "norm, fro"),
    ("allclose", lambda x: x.single.allclose(x.single), "float32"),
    ("norm", lambda x: x.A.norm("two"), "norm 'two' is not one of"),
    ("norm", lambda x: x.tall.norm(), "norm, 13 x 7"),
    ("norm of a tall one", lambda x: x.tall.T.norm(), "norm, 13 x 7"),
    ("from_global", lambda x: x.deal(root=1), "root=1"),
    ("from_global", lambda x: x.deal(), "root=None"),
    ("from_global", lambda x: x.deal(root=0, block=4), "4"),
    (
        "from_global everywhere",
        lambda x: x.Matrix.from_global(np.eye(6), grid=x.grid),
        "DistMatrix.from_global, an array of shape (6, 6)",
    ),
    (
        "from_global everywhere",
        lambda x: x.Matrix.from_global(None, grid=x.grid),
        "array is None: if only one rank has the array, all ranks must pass root=",
    ),
    ("from_global everywhere", lambda x: x.Matrix.from_local(x.A.local, x.A.shape, grid=x.grid), "from_local"),
    ("random", lambda x: x.random(seed=1), "DistMatrix.random, seed=1"),
    ("random", lambda x: x.random(seed=10**5000), "seed must be <="),
    ("random", lambda x: x.random(block=10**5000), "must be <="),
    ("random", lambda x: x.random(kind="normal"), "normal"),
    ("random", lambda x: x.random(device="cuda"), "device"),
    ("random", lambda x: x.Matrix.eye(4, grid=x.grid), "DistMatrix.eye"),
    ("random", lambda x: x.Matrix.zeros((4, 4), grid=x.grid), "DistMatrix.zeros"),
    ("verify", lambda x: x.pdgemm.verify(x.C, 1, x.A, None), "B must be a DistMatrix"),
    ("verify", lambda x: x.pdgemm.verify(0, 1, x.A, x.B), "C must be a DistMatrix"),
    ("verify", lambda x: x.pdgemm.verify(x.C, 1, x.A, x.B, 1), "C0 is missing"),
    ("verify", lambda x: x.pdgemm.verify(x.C, 1, x.single, x.B, 1, x.C), "float32"),
    ("load", lambda x: x.load(path=None), "NoneType"),
    ("load", lambda x: x.load(device="cuda"), "hdf5.load, cuda"),
    ("load", lambda x: x.load(block=3), "3"),
    ("load", lambda x: x.load(name="y"), "y"),
    ("load", lambda x: x.load(progress=boom), "boom"),
    ("save", lambda x: x.save(path=None), "NoneType"),
    ("save", lambda x: x.save(progress=boom), "boom"),
    ("save", lambda x: x.load(), "hdf5.load"),
    ("grids", lambda x: x.pdgemm.ProcessGrid(x.comm, (0, 1)), "positive"),
    ("batch", lambda x: x.pdgemm.Batch.from_global(np.ones((1, 2, 2)), x.comm), "Batch.from_global"),
]


@pytest.fixture(scope="module")
def job() -> Any:
    """Matrices and functions that the cases use."""
    comm = MPI.COMM_WORLD
    with pdgemm.ProcessGrid(comm) as grid:
        x = SimpleNamespace(comm=comm, pdgemm=pdgemm, gemm=pdgemm.pdgemm, grid=grid, Matrix=pdgemm.DistMatrix)
        x.A, x.B = (pdgemm.DistMatrix.random((12, 12), grid=grid, seed=seed) for seed in (1, 2))
        x.C = x.A.copy()
        x.plan = pdgemm.plan(x.A, x.B, x.C)
        x.tall, x.single = pdgemm.DistMatrix.random((13, 7), grid=grid), x.A.astype("float32")
        with pdgemm.ProcessGrid(comm) as freed:
            x.freed = pdgemm.DistMatrix.random((12, 12), grid=freed)
        x.random = lambda **given: pdgemm.DistMatrix.random((4, 4), grid=grid, **given)
        x.deal = lambda **given: pdgemm.DistMatrix.from_global(np.eye(5), grid=grid, **given)
        x.load = lambda path="", name="x", **given: hdf5.load(x.path if path == "" else path, name, grid, **given)
        x.save = lambda path="", **given: hdf5.save(x.path if path == "" else path, "x", x.A, **given)
        yield x


@pytest.mark.parametrize("usual", USUAL)
def test_all_raise_the_same(job: Any, shared_tmp_path: Path, usual: str) -> None:
    """If the first or the last rank deviates, all ranks raise the same error."""
    job.path = shared_tmp_path / "a.h5"
    hdf5.save(job.path, "x", job.A)
    kept, cases = job.A.local.copy(), [(other, message) for name, other, message in CASES if name == usual]
    for deviates, (other, message) in itertools.product((0, job.comm.size - 1), cases):
        with pytest.raises((PdgemmError, ValueError, TypeError)) as caught:
            (other if job.comm.rank == deviates else USUAL[usual])(job)
        told = caught.type, str(caught.value)
        assert job.comm.allgather(told) == [told] * job.comm.size
        assert message in told[1]
        assert "BlockCyclic(" not in told[1]  # layouts are described in words
        # later collective calls succeed, and A is unchanged: assignments were refused before they wrote
        assert hdf5.load(job.path, "x", job.grid).allclose(job.A)
        assert np.array_equal(kept, job.A.local)


# equal arguments in two forms: one rank passes the second
SAME: dict[str, tuple[Act, Act]] = {
    "block": (lambda x: x.random(block=2), lambda x: x.random(block=(np.int64(2), 2))),
    "from_global": (lambda x: x.deal(block=2), lambda x: x.deal(block=[2, 2], source=[0, 0])),
    "from_global, root": (lambda x: x.deal(root=1, block=2), lambda x: x.deal(root=np.int64(1), block=(2, 2))),
    "type": (lambda x: x.random(dtype="f4"), lambda x: x.random(dtype=np.float32)),
    "grid": (
        lambda x: x.pdgemm.ProcessGrid(x.comm, (x.comm.size, 1)).free(),
        lambda x: x.pdgemm.ProcessGrid(x.comm, [np.int64(x.comm.size), 1], ranks=None).free(),
    ),
    "ranks": (
        lambda x: x.pdgemm.ProcessGrid(x.comm, ranks=range(x.comm.size)).free(),
        lambda x: x.pdgemm.ProcessGrid(x.comm, ranks=np.arange(x.comm.size)).free(),
    ),
    "set": (lambda x: x.A.copy().__setitem__(EVERYWHERE, 1), lambda x: x.A.copy().__setitem__(EVERYWHERE, 1.0)),
    "allclose": (lambda x: x.A.allclose(1, rtol=0), lambda x: x.A.allclose(np.float32(1), rtol=0.0, equal_nan=0)),
    "verify": (lambda x: x.pdgemm.verify(x.C, 1, x.A, x.B), lambda x: x.pdgemm.verify(x.C, 1.0, x.A, x.B, 0)),
    "pdgemm": (
        lambda x: x.gemm(1, x.A, x.B, 0, x.C.copy(), transa="T"),
        lambda x: x.gemm(np.float64(1), x.A, x.B, 0.0, x.C.copy(), transa="t"),
    ),
    "load": (lambda x: x.load(dtype="f8"), lambda x: x.load(path=str(x.path), dtype=np.float64, verify=0)),
}


def test_equal_arguments_in_other_forms_are_accepted(job: Any, shared_tmp_path: Path) -> None:
    job.path = shared_tmp_path / "a.h5"
    hdf5.save(job.path, "x", job.A)
    for one, other in SAME.values():
        (other if job.comm.rank == 0 else one)(job)
        job.comm.Barrier()


def test_calls_without_a_communicator_are_refused_immediately(job: Any) -> None:
    other = job.comm.Split(job.comm.rank % 2)
    between = other.Create_intercomm(0, job.comm, 1 - job.comm.rank % 2)
    with pytest.raises(GridError, match=r"got \(2, 2\); the shape of a grid is shape="):
        job.pdgemm.ProcessGrid((2, 2))
    for junk in (between, MPI.COMM_NULL, "comm", job.grid):
        with pytest.raises(GridError, match="an intracommunicator of this rank"):
            job.pdgemm.ProcessGrid(junk)
    between.Free()
    other.Free()
    for call in (lambda: job.gemm(1, 2, 3), lambda: job.pdgemm.verify(1, 2, 3, 4), lambda: hdf5.save("x", "x", None)):
        with pytest.raises(DTypeError, match="must be a DistMatrix, got"):
            call()
    for make in (job.Matrix.empty, job.Matrix.random, job.Matrix.eye):
        with pytest.raises(GridError, match="grid must be a ProcessGrid, got Intracomm"):
            make((3, 3), grid=job.comm)


def test_allclose_of_a_real_matrix_takes_any_number(job: Any) -> None:
    ones = job.Matrix.from_function(lambda i, j: 1, (4, 4), grid=job.grid)
    assert ones.allclose(1) and ones.allclose(np.float32(1)) and ones.allclose(1 + 0j) and not ones.allclose(1 + 2j)


def test_deviating_ranks_are_named() -> None:
    assert _disagreement(["f, 1, 2, 3", "f, 1, 5, 3", "f, 1, 2, 3"]).endswith("ranks 0, 2: f, 2; rank 1: f, 5")
    assert _disagreement(["f, 1", "f, 1, more"]).endswith("rank 0: f; rank 1: f, more")
    assert _disagreement(["f, 1", "g, 1"]).endswith("rank 0: f; rank 1: g")
    shapes = _disagreement(["f, shape=(0, 1), rows (2, 3, 4), x=(a, b)", "f, shape=(0, 5), rows (2, 3, 4), x=(a, b)"])
    assert shapes.endswith("rank 0: f, shape=(0, 1); rank 1: f, shape=(0, 5)")
    assert _disagreement(["", "g"]).endswith("rank 0: ; rank 1: g")
