"""Files as one process sees them, before or after what all ranks do; what is in them, and what storage loses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

STORAGE: list[dict[str, Any]] = [{}, {"chunks": (16, 24)}, {"chunks": (31, 7), "compression": "gzip", "shuffle": True}]


def only_file(folder: Path, comm: Any) -> list[str]:
    """The names in a folder, seen when all ranks are done."""
    comm.Barrier()
    names = comm.bcast(sorted(os.listdir(folder)) if comm.rank == 0 else None)
    comm.Barrier()
    return list(names)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder and the folders in it."""
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@contextmanager
def unchanged(comm: Any, folder: Path) -> Iterator[None]:
    """What is in a folder is there afterwards, too, and nothing else."""
    before = by_rank_0(comm, lambda: contents(folder))
    yield
    assert by_rank_0(comm, lambda: contents(folder)) == before


def refused(
    comm: Any, error: type[Exception], message: str, call: Callable[..., Any], /, *arguments: Any, **options: Any
) -> None:
    """The same error, in one line, on all ranks."""
    with pytest.raises(error, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def by_rank_0(comm: Any, work: Any) -> Any:
    """What plain h5py does in one process, before or after the others; an error is everyone's."""
    comm.Barrier()
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work()
        except Exception as bad:
            error = f"{type(bad).__name__}: {bad}"
    result, error = comm.bcast((result, error))
    assert error is None, error
    return result


@contextmanager
def edited(comm: Any, path: Path | str, mode: str = "r+", **how: Any) -> Iterator[h5py.File]:
    """An HDF5 file for plain h5py: what rank 0 does is on the disk, and the others do the same to a copy in memory."""
    comm.Barrier()
    copy: dict[str, Any] = {"driver": "core", "backing_store": False, "locking": False}
    file = h5py.File(path, mode, **copy, **how) if comm.rank else None
    comm.Barrier()
    with file or h5py.File(path, mode, **how) as opened:
        yield opened
    comm.Barrier()


def elements(shape: tuple[int, int], dtype: Any, seed: int) -> np.ndarray:
    r = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "i":
        return r.integers(-9, 10, shape).astype(dtype)
    x = r.normal(size=shape)
    return (x + 1j * r.normal(size=shape)).astype(dtype) if np.dtype(dtype).kind == "c" else x.astype(dtype)


def write(comm: Any, path: Path, **given: Any) -> None:
    """Write datasets: an array, or an array and how it is stored."""

    def work() -> None:
        with h5py.File(path, "w") as file:
            for name, (array, storage) in given.items():
                file.create_dataset(name, data=array, **storage)

    by_rank_0(comm, work)


def read(comm: Any, path: Path, name: str) -> np.ndarray:
    def work() -> Any:
        with h5py.File(path) as file:
            return file[name][()]

    array: np.ndarray = by_rank_0(comm, work)
    return array


def zeroed(start: int, stop: int) -> Any:
    """What the disk holds of a file if it never gets some of its bytes."""

    def to_disk(path: Path, but: Any = None) -> None:
        with path.open("rb+") as file:
            file.seek(start)
            file.write(bytes(stop - start))

    return to_disk


dropped = [zeroed(0, 8), zeroed(0, 96), lambda path, _: os.truncate(path, 0), lambda path, _: os.truncate(path, 100)]
