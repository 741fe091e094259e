"""The examples of tensors on these ranks, with small extents; docs/tensors_*.md run them as they are, on 4 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from example_programs import example

from pdgemm import ProcessGrid, einsum, plan_einsum
from pdgemm.io import hdf5

pytestmark = pytest.mark.mpi


def test_ladder(comm: Any, shared_tmp_path: Path) -> None:
    """The integrals have the symmetries of real orbitals; values are NumPy's, and words those of the plan."""
    module, path = example("ccsd_ladder"), shared_tmp_path / "integrals.h5"
    if comm.rank == 0:
        module.write_integrals(path, 2, 5)
    comm.Barrier()
    with h5py.File(path) as file:
        v, t = file["vvvv"][:], file["t2"][:]
    assert all(np.allclose(v, v.transpose(axes)) for axes in ((1, 0, 3, 2), (2, 1, 0, 3), (0, 3, 2, 1)))
    assert np.allclose(t, t.transpose(1, 0, 3, 2))
    with ProcessGrid(comm) as grid:
        R, T, _, plan = module.ladder(path, grid)
        expected = np.einsum("abef,efij->abij", v, t)
        np.testing.assert_allclose(R.allgather(), expected, atol=1e-14)
        assert comm.allreduce(R.report.counted.words_received, max) == plan.words
        np.testing.assert_allclose(module.energy(T, R), ((2 * t - t.transpose(0, 1, 3, 2)) * expected).sum())


def test_polarisability(comm: Any, shared_tmp_path: Path) -> None:
    """Values are NumPy's, and both formulas of the energy agree."""
    module, path = example("rpa"), shared_tmp_path / "three_index.h5"
    if comm.rank == 0:
        module.write_integrals(path, 7, 2, 3)
    comm.Barrier()
    with h5py.File(path) as file:
        b, gaps = file["B"][:], file["virtual"][:] - file["occupied"][:][:, None]
    with ProcessGrid(comm) as grid:
        B = hdf5.load(path, "B", grid)
        plan = plan_einsum(module.POLARISABILITY, B, gaps.shape, B)
        nodes, weights = module.quadrature(12)
        Pi = [module.polarisability(B, gaps, x, plan) for x in nodes]
        expected = -4 * np.einsum("Pia,ia,Qia->PQ", b, gaps / (gaps**2 + nodes[3] ** 2), b)
        np.testing.assert_allclose(Pi[3].allgather(), expected, atol=1e-14)
        energy = weights @ [module.integrand(x) for x in Pi] / (2 * np.pi)
        np.testing.assert_allclose(energy, module.plasmon_energy(B, gaps), rtol=1e-5)


def test_network(comm: Any) -> None:
    """With slices and without them."""
    module = example("tensor_network")
    with ProcessGrid(comm) as grid:
        tensors = module.network(2, grid)
        expected = np.einsum(module.CUBE, *(x.allgather() for x in tensors))
        plans = [plan_einsum(module.CUBE, *tensors, memory_limit=limit) for limit in (None, 300)]
        assert [len(x.slices) > 0 for x in plans] == [False, True]
        for plan in plans:
            np.testing.assert_allclose(einsum(module.CUBE, *tensors, optimize=plan), expected)
