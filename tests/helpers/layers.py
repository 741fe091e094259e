"""Shared by tests of layers: meshes, random numbers, and the comparison with numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.parallel import Mesh


def mesh_of(comm: Any, **sizes: int) -> Any:
    """A mesh with all ranks along tp, or of these sizes."""
    return Mesh(comm.Dup(), **(sizes or {"tp": comm.size}))


def numbers(shape: tuple[int, ...], seed: int, dtype: Any = float) -> np.ndarray:
    """Return normal random numbers, the same on all ranks."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(result: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-13) -> None:
    """Are shapes equal, and do elements differ by at most a tolerance times the largest element?"""
    assert result.shape == wanted.shape
    assert np.isfinite(result.astype(float)).all()
    assert np.abs(result - wanted).max(initial=0) <= tolerance * max(1.0, np.abs(wanted).max(initial=0))
