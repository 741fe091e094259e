"""multiply_files() in a script: what `pdgemm multiply` does, in memory and in parts, with the same checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factored import rng_matrix
from tiers import every_grid

from pdgemm import DistMatrix, ProcessGrid, multiply_files
from pdgemm.errors import ArgumentError, FileError, LayoutError, MemoryLimitError
from pdgemm.instrument.observer import Observer
from pdgemm.io import hdf5

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Path:
    """A folder of all ranks with A (90 x 40) and B (40 x 50) in one file."""
    shared = Path(comm.bcast(str(tmp_path)))
    with ProcessGrid(comm) as grid:
        for name, x in (("x", rng_matrix(90, 40, "d")), ("y", rng_matrix(40, 50, "d"))):
            hdf5.save(shared / "in.h5", name, DistMatrix.from_global(x, grid=grid))
    return shared


class Heard(Observer):
    """Keeps the keys of what it is told."""

    def __init__(self) -> None:
        self.keys = list[str]()

    def report(self, key: str, what: Any) -> None:
        self.keys.append(key)

    def note(self, key: str, lines: Any, fact: Any) -> None:
        self.keys.append(key)

    def planned(self, plan: Any) -> None:
        self.keys.append("planned")


@every_grid
def test_in_memory_and_in_parts(comm: Any, folder: Path) -> None:
    x, y = rng_matrix(90, 40, "d"), rng_matrix(40, 50, "d")
    a, b, c = f"{folder}/in.h5:/x", (folder / "in.h5", "y"), f"{folder}/c.h5:/z"
    with ProcessGrid(comm) as grid:
        for way in ({}, {"block": 16}, {"memory": 3_000_000}, {"memory": 3_000_000, "checkpoint": 3600.0}):
            heard = Heard()
            first = multiply_files(a, b, c, alpha=2, grid=grid, seed=1, observer=heard, overwrite=True, **way)
            assert first.verified is not None and first.verified.passed and first.wrote is not None, way
            z = hdf5.load(c, grid=grid).allgather()
            assert np.allclose(z, 2 * x @ y, rtol=1e-12, atol=1e-12)
            again = multiply_files(a, b, c, alpha=-1, beta=3, grid=grid, **way)
            assert again.verified is None and again.product is not None
            assert np.allclose(hdf5.load(c, grid=grid).allgather(), 3 * z - x @ y, rtol=1e-12, atol=1e-11)
            if "memory" in way:
                assert heard.keys == ["plan", "product", "verify", "wrote"]
            else:
                assert heard.keys == ["planned", "read", "read", "product", "verify", "wrote"]
        turned = multiply_files(b, a, (folder / "t.h5", "t"), transa="T", transb="t", grid=grid)
        assert turned.wrote is not None
        assert np.allclose(hdf5.load(folder / "t.h5", "t", grid).allgather(), y.T @ x.T, rtol=1e-12, atol=1e-12)


def test_bad_arguments_write_nothing(comm: Any, folder: Path) -> None:
    a, b, c = f"{folder}/in.h5:/x", f"{folder}/in.h5:/y", f"{folder}/none.h5:/z"
    wrong: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
        ((a, a, c), {}, LayoutError, "90 x 40"),
        ((a, b, "none.h5"), {}, ArgumentError, "a dataset is 'FILE:/DATASET'"),
        ((a, b, a), {}, ArgumentError, "exists, and is A: it is replaced only with overwrite=True"),
        ((a, f"{folder}/in.h5:/w", c), {}, FileError, "in.h5"),
        ((a, b, c), {"memory": 10}, MemoryLimitError, "memory"),
        ((a, b, c), {"memory": 3_000_000, "block": 8}, ArgumentError, "do not go with block"),
        ((a, b, c), {"mtbf": 60.0}, ArgumentError, "mtbf is for checkpoint"),
        ((a, b, c), {"transa": "Q"}, ArgumentError, "transa"),
    )
    with ProcessGrid(comm) as grid:
        for datasets, how, error, message in wrong:
            with pytest.raises(error, match=message):
                multiply_files(*datasets, grid=grid, **how)
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different arguments"):
                multiply_files(a, b, c, alpha=comm.rank, grid=grid)
            with pytest.raises(ArgumentError, match="different arguments"):
                multiply_files(a, b, c, overwrite=comm.rank > 0, grid=grid)
    comm.Barrier()
    assert sorted(x.name for x in folder.iterdir()) == ["in.h5"]
