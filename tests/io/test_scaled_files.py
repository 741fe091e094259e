"""Matrices of 8-bit values with scales in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import grid_shapes

from pdgemm import DistMatrix, ProcessGrid, Scaled, quantize
from pdgemm.io.scaled_files import load_scaled, save_scaled

pytestmark = pytest.mark.mpi


def test_scaled_matrices_are_saved_and_loaded(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "weights.h5"
    shape = grid_shapes(comm.size)[-1]
    with ProcessGrid(comm) as grid, ProcessGrid(comm, shape) as other:
        A = DistMatrix.random((45, 37), grid=grid, block=(8, 4), kind="normal")
        powers = quantize(A, "float8_e4m3fn", "block", block=(4, 4), scale_dtype="float8_e8m0fnu")
        matrices = {
            "layer/w": powers,
            "turned": quantize(A, "float8_e5m2", "row").T,
            "whole": quantize(A, "int8", "column"),
            "plain": A,
        }
        save_scaled(path, matrices, attrs={"step": 3})
        saved = load_scaled(path, other, {"layer/w/values": {"block": 5}})
        assert saved.attrs == {"step": 3} and {*saved.matrices} == {*matrices}
        for name, x in matrices.items():
            y: Any = saved.matrices[name]
            if isinstance(x, Scaled):
                assert (y.dtype, y.scales.dtype, y.block) == (x.dtype, x.scales.dtype, x.block)
                x, y = x.decode(), y.decode()
            assert np.array_equal(x.allgather(), y.allgather())
        assert saved.matrices["layer/w"].values.block == (5, 5)  # type: ignore[attr-defined]
