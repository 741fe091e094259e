"""Exchange of arrays with other libraries, errors for objects that cannot be converted, and vectors in NumPy."""

# ruff: noqa: B023  # functions are called in the same iteration
from __future__ import annotations

import copy
import operator
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from mpi4py import MPI
from problems import grid_shapes
from tiers import in_turn

from pdgemm import Batch, DistMatrix, ProcessGrid, plan
from pdgemm.errors import ArgumentError
from pdgemm.interchange import from_dask

pytestmark = pytest.mark.mpi


class OnlyDLPack:
    """An array of a library that exports by DLPack only."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


class OnlyArray:
    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._x


EXPORTERS: list[Any] = [
    OnlyDLPack,
    OnlyArray,
    lambda x: SimpleNamespace(__array_interface__=x.__array_interface__, kept=x),
    lambda x: memoryview(x),
    lambda x: x.view(np.matrix),  # type: ignore[no-any-return]
]


def refused_alike(comm: Any, kind: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("exported", EXPORTERS)
def test_any_object_with_memory_of_the_host(comm: Any, grid: Any, exported: Any) -> None:
    x = np.random.default_rng(1).standard_normal((7, 5))
    A = DistMatrix.from_global(exported(x), grid=grid, block=2)
    assert np.array_equal(A.allgather(), x)
    mine = A.local.copy()
    B = DistMatrix.from_local(exported(mine), (7, 5), grid=grid, block=2)
    assert type(B.local) is np.ndarray and (B.local.size == 0 or np.shares_memory(B.local, mine))
    assert np.array_equal(B.allgather(), x)
    C = DistMatrix.from_blocks(exported(x if comm.rank == 0 else x[:0]), grid=grid, axis=0)
    assert np.array_equal(C.allgather(), x)


def test_objects_that_are_not_arrays(comm: Any, grid: Any) -> None:
    class Late:
        """An array that cannot be exported now, like torch's arrays that require gradients."""

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.\nUse tensor.detach().numpy() instead.")

    cases: list[tuple[Any, str]] = [
        (scipy.sparse.eye(4), "a dia_matrix is sparse: convert it first, array.toarray()"),
        (scipy.sparse.coo_array((4, 4)), "a coo_array is sparse"),
        (np.ma.masked_array(np.ones((4, 4)), mask=np.eye(4)), "a masked array would lose its mask: fill it first"),
        ([np.ma.array(row) for row in np.ones((4, 4))], "would lose its mask"),
        (object(), "<object object at .* is not an array, and does not export one"),
        (Late(), "NumPy cannot read this Late as an array: Can't call .* grad. Use tensor.detach"),
        (np.array([[None]]), "elements are numbers"),
    ]
    for given, message in cases:
        for take in (
            lambda given=given: DistMatrix.from_global(given, grid=grid),
            lambda given=given: DistMatrix.from_global(given, grid=grid, root=0),
            lambda given=given: DistMatrix.from_local(given, (4, 4), grid=grid),
            lambda given=given: DistMatrix.from_blocks([given], grid=grid, axis=0),
            lambda given=given: Batch.from_global([given], comm),
            lambda given=given: Batch.from_local([given], comm),
        ):
            with pytest.raises(TypeError, match=message) as caught:
                take()
            assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match="array is None: if only one rank has the array, all .* root="):
        DistMatrix.from_global(None, grid=grid)
    with pytest.raises(TypeError, match="None is not an array, and does not export one"):
        DistMatrix.from_local(None, (4, 4), grid=grid)


def test_local_arrays_are_exported_and_errors_name_them(comm: Any, grid: Any) -> None:
    A = DistMatrix.random((8, 6), grid=grid, block=2)
    out = np.from_dlpack(A.local)
    assert out.size == 0 or np.shares_memory(out, A.local)
    way = r"use .local, .to_global\(root\) or .allgather\(\)"
    for call in (
        lambda: np.from_dlpack(A),
        A.__dlpack_device__,
        lambda: np.asarray(A),
        lambda: DistMatrix.from_global(A, grid=grid),  # type: ignore[arg-type]
    ):
        refused_alike(comm, TypeError, f"a DistMatrix is not one array.*{way}", call)


# ------------------------------------------------------------------ other libraries
@pytest.mark.on_ranks(1, 2, 4)
def test_dask_arrays(comm: Any) -> None:
    da = pytest.importorskip("dask.array")

    x = np.random.default_rng(2).standard_normal((23, 17))
    computed: list[tuple[int, ...]] = []

    def seen(part: np.ndarray) -> np.ndarray:
        computed.append(part.shape)
        return part + 1

    ways = (5, 4), (23, 1), ((1, 20, 2), (17,)), (100, 100)
    for number, (chunks, shape) in enumerate(in_turn(ways, grid_shapes(comm.size))):
        with ProcessGrid(comm, shape) as grid:
            lazy = da.from_array(x, chunks=chunks).map_blocks(seen, dtype="f8", meta=np.empty((0, 0)))
            computed.clear()
            A = from_dask(lazy, grid=grid, block=3, order="CF"[number % 2])
            assert np.array_equal(A.allgather(), x + 1)
            assert A.report.counted == A.report.predicted
            every = comm.allgather(computed)
            assert sum(map(len, every)) == lazy.npartitions  # each chunk is on one rank
            assert max(map(len, every)) <= -(-lazy.npartitions // comm.size) + 1


def test_dask_arrays_of_unknown_shapes(comm: Any, grid: Any) -> None:
    da = pytest.importorskip("dask.array")

    x = np.random.default_rng(2).standard_normal((23, 17))
    lazy = da.from_array(x, chunks=(5, 4))
    A = DistMatrix.from_global(lazy, grid=grid)
    assert np.array_equal(A.allgather(), x)
    assert from_dask(da.zeros((0, 4)), grid=grid).shape == (0, 4)
    assert float(da.from_array(np.ascontiguousarray(A.local), chunks=(2, 2)).sum()) == pytest.approx(A.local.sum())

    def fails(part: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("in a chunk")

    broken = lazy.map_blocks(fails, dtype="f8", meta=np.empty((0, 0)))
    for kind, message, call in [
        (TypeError, "not one array, and dask cannot divide it", lambda: da.from_array(A)),
        (TypeError, "takes a dask array, got ndarray", lambda: from_dask(x, grid=grid)),
        (ValueError, r"two dimensions.*\(4,\)", lambda: from_dask(da.zeros(4), grid=grid)),
        (ValueError, "unknown sizes: call array.compute_chunk", lambda: from_dask(lazy[lazy[:, 0] > 0], grid=grid)),
        (TypeError, "elements are numbers", lambda: from_dask(da.zeros((4, 4), dtype="M8[s]"), grid=grid)),
        (TypeError, "would lose its mask", lambda: from_dask(da.ma.masked_greater(lazy, 1.0), grid=grid)),
        (ZeroDivisionError, "in a chunk", lambda: from_dask(broken, grid=grid)),
    ]:
        refused_alike(comm, kind, message, call)
    if comm.size > 1:
        chunks = 2 + (comm.rank == 1)
        differs = lambda: from_dask(da.zeros((4, 4), chunks=chunks), grid=grid)  # noqa: E731
        refused_alike(comm, ValueError, "different arguments", differs)


@pytest.mark.parametrize("name", ["jax.numpy", "torch"])
def test_arrays_of_other_libraries(comm: Any, grid: Any, name: str) -> None:
    library = pytest.importorskip(name, reason=f"{name} is not installed")

    for dtype in ("float32", "complex64", "int32"):
        whole = np.arange(35).reshape(7, 5).astype(dtype)
        x = library.asarray(whole)
        A = DistMatrix.from_global(x, grid=grid, block=2)
        assert A.dtype == dtype and np.array_equal(A.allgather(), whole)
        assert np.array_equal(DistMatrix.from_blocks(x, grid=grid, axis=0).to_blocks(rows=(0, 7)), whole)
        B = DistMatrix.from_local(library.asarray(A.local.copy()), (7, 5), grid=grid, block=2)
        assert np.array_equal(B.allgather(), whole)
        assert np.array_equal(np.asarray(library.from_dlpack(A.local.copy())), A.local)
    refused_alike(comm, TypeError, "not one array", lambda: library.asarray(A))


# ------------------------------------------------------------------ pickles and copies
def test_errors_of_pickling_name_the_remedy(comm: Any, grid: Any) -> None:
    A, B = (DistMatrix.random((6, 6), grid=grid, seed=seed) for seed in (1, 2))
    batch = Batch.from_local(np.ones((2, 3, 3)), comm)
    uneven = Batch.from_local([np.ones((2, 3)), np.ones((1, 1))], comm)
    C = DistMatrix.empty((6, 6), grid=grid)
    prepared = plan(A, B, C).prepare(A, B, C)
    for given, message in [
        (A, r"distributed over ranks and cannot be pickled: save it by hdf5.save, or use .local, .to_global\(root\)"),
        (grid, r"a ProcessGrid .*cannot be pickled: make it on every rank, ProcessGrid\(comm, shape\)"),
        (batch, r"a Batch .*cannot be pickled: use .items or .to_global\(root\)"),
        (prepared, r"cannot be copied or pickled: .*plan.prepare\(A, B, C\)"),
    ]:
        # on this rank only: otherwise the others would wait for a root that fails to send
        for send in (pickle.dumps, lambda x: MPI.COMM_SELF.bcast(x), lambda x: pickle.dumps([x])):
            refused_alike(comm, TypeError, message, lambda send=send, given=given: send(given))
    refused_alike(comm, TypeError, "cannot be copied", lambda: copy.deepcopy(prepared))
    held = copy.deepcopy({"A": A, "grid": grid, "batch": batch, "uneven": uneven})
    assert held["grid"] is grid is copy.copy(grid)
    assert held["A"].grid is grid
    for one, other in ((held["A"].local, A.local), (held["batch"].items, batch.items)):
        assert np.array_equal(one, other)
        assert one.size == 0 or not np.shares_memory(one, other)
    assert all(np.array_equal(x, y) and x is not y for x, y in zip(held["uneven"].items, uneven.items))
    again = pickle.loads(pickle.dumps(prepared.plan))  # plans can be pickled
    assert again == prepared.plan
    assert np.allclose(prepared().allgather(), again.execute(A, B, DistMatrix.empty((6, 6), grid=grid)).allgather())


# ------------------------------------------------------------------ vectors, by NumPy's names
@pytest.mark.on_ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_outer(comm: Any, dtype: str) -> None:
    def drawn(*shape: int) -> np.ndarray:
        found = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        return (found if dtype == "complex128" else found.real).astype(dtype)

    rng = np.random.default_rng(4)
    x, y, a = drawn(11), drawn(7), drawn(11, 7)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=2)
            column, row = A[:, 3:4], A[2:3, :]
            for left, right, whole in [
                (column, row, np.outer(a[:, 3], a[2])),
                (row, column, np.outer(a[2], a[:, 3])),
                (column, column, np.outer(a[:, 3], a[:, 3])),
                (row.H, row, np.outer(a[2].conj(), a[2])),
                (column, y, np.outer(a[:, 3], y)),
                (x, row, np.outer(x, a[2])),
                (row, x.tolist(), np.outer(a[2], x)),
                (column, 2.0, np.outer(a[:, 3], 2.0)),
            ]:
                made = np.outer(left, right)
                assert isinstance(made, DistMatrix)
                assert np.array_equal(made.allgather(), whole)
            if shape[0] > 1 and comm.size > 1:
                continue
            masked = np.ma.array([1.0, 2.0])
            for call, kind, message in [
                # on one rank only
                (lambda: np.outer(column, masked if comm.rank == 0 else y), TypeError, "would lose its mask"),
                (lambda: np.outer(A, y), ValueError, "numpy.outer takes matrices of one column or one row.*11 x 7"),
                (lambda: np.outer(column, y, out=A), TypeError, "numpy.outer"),
                (lambda: np.matvec(A, y), TypeError, r"matvec is not available .*A.matvec\(x\)"),
                (lambda: np.vecmat(x, A), TypeError, r"vecmat is not available .*use x.conj\(\) @ A"),
                (lambda: operator.matmul(x, A.T), ValueError, "the vector must have"),
            ]:
                refused_alike(comm, kind, message, call)
