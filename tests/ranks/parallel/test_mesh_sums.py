"""Mesh.all_reduce: sums in the type of the addends, exact for integers, their words, and one exception on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdgemm.errors import PdgemmError
from pdgemm.parallel import Mesh
from pdgemm.schedules.collectives.collective import sum_of_array

pytestmark = pytest.mark.mpi


def addends(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return numbers near the limits of integers of 64 bits, of both signs, or numbers whose sums are rounded."""
    rng = np.random.default_rng(rank)
    if np.dtype(dtype).kind in "iu":
        return np.asarray(rng.integers(0, 2**63, shape) * (-1) ** rank).astype(dtype)
    return np.asarray(rng.standard_normal(shape) + rng.standard_normal(shape) * 1e9).astype(dtype)


@pytest.mark.on_ranks(3, 4)
@pytest.mark.parametrize("dtype", ["int64", "int8", "float32", "complex128"])
def test_sums(comm: Any, dtype: str) -> None:
    """Along every axis, of any shape: integers modulo 2^bits; others the same on all ranks, to the last bits right."""
    for tp in (1, 3) if comm.size == 3 else (2,):
        with Mesh(comm.Dup(), dp=-1, tp=tp) as mesh:
            for axis in ("dp", "tp"):
                line = mesh.shape.line(axis, comm.rank)
                assert mesh.sum(comm.rank, 1, axis=axis) == [sum(line), len(line)]
                assert mesh.line(axis).rank == mesh.index(axis) == line.index(comm.rank)
                for shape in ((), (0, 3), (7, 2, 5)):
                    x = addends(comm.rank, shape, dtype)
                    mine, kind = x.copy(order="F"), f"{axis} of {shape}"
                    total, before = mesh.all_reduce(mine, axis=axis, kind=kind), x.copy()
                    assert np.array_equal(mine, before) and (total.shape, total.dtype) == (shape, x.dtype)
                    each = np.array([addends(rank, shape, dtype) for rank in line])
                    if x.dtype.kind in "iu":
                        assert np.array_equal(total, each.sum(axis=0, dtype=dtype))
                    else:
                        error = len(line) * np.finfo(dtype).eps * abs(each).sum(axis=0)
                        assert (abs(total - each.sum(axis=0)) <= error).all()
                    assert all(x == total.tobytes() for x in mesh.line(axis).comm.allgather(total.tobytes()))
                    moved, d, n = mesh.traffic[kind], len(line), x.size
                    own = n // d + (mesh.index(axis) < n % d)
                    assert moved == sum_of_array(n, d, x.dtype).traffic(mesh.index(axis))
                    assert moved.words_received == (d - 2) * own + n


@pytest.mark.on_ranks(2, 3)
def test_other_arguments_on_one_rank(comm: Any) -> None:
    """Where all are new, and where the others pass what all have passed before; and then sums go on."""
    x = np.arange(6)
    with Mesh(comm.Dup(), dp=-1) as mesh:
        for _ in range(2):
            others: dict[str, Any] = {
                "x of all_reduce is an array of NumPy, got list on rank 1": x.tolist(),
                "sums integers and NumPy's floats, got bool on rank 1": x > 2,
                "float64": x * 1.0,
                "(2, 3)": x.reshape(2, 3),
            }
            for message, other in others.items():
                with pytest.raises(PdgemmError) as raised:
                    mesh.all_reduce(other if comm.rank == 1 else x)
                assert all(message in text for text in comm.allgather(str(raised.value)))
            with pytest.raises(PdgemmError, match="weights"):
                mesh.all_reduce(x, kind="weights" if comm.rank == 1 else "sums")
            assert np.array_equal(mesh.all_reduce(x), x * comm.size)
