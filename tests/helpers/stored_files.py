"""Files, read or edited by rank 0 while the other ranks wait; comparisons of folders; lost bytes."""

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
    """Return the names in a folder after all ranks have reached this call."""
    comm.Barrier()
    names = comm.bcast(sorted(os.listdir(folder)) if comm.rank == 0 else None)
    comm.Barrier()
    return list(names)


def contents(folder: Path) -> dict[str, bytes]:
    """Return {relative path: contents} of all files in a folder and its subfolders."""
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@contextmanager
def unchanged(comm: Any, folder: Path) -> Iterator[None]:
    """Check that the enclosed block does not change the contents of a folder."""
    before = by_rank_0(comm, lambda: contents(folder))
    yield
    assert by_rank_0(comm, lambda: contents(folder)) == before


def refused(
    comm: Any, error: type[Exception], message: str, call: Callable[..., Any], /, *arguments: Any, **options: Any
) -> None:
    """Check that the call raises the same error on all ranks, with a message of one line."""
    with pytest.raises(error, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def by_rank_0(comm: Any, work: Any) -> Any:
    """Call `work` on rank 0, while the others wait; return its result, or raise its error, on all ranks."""
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
    """Open an HDF5 file by plain h5py for changes: rank 0 the file, other ranks copies of it in memory."""
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
    """Write datasets to a new file: name = (array, storage options)."""

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
    """Return a function that zeroes a range of bytes of a file, like a storage that loses them."""

    def to_disk(path: Path, but: Any = None) -> None:
        with path.open("rb+") as file:
            file.seek(start)
            file.write(bytes(stop - start))

    return to_disk


dropped = [zeroed(0, 8), zeroed(0, 96), lambda path, _: os.truncate(path, 0), lambda path, _: os.truncate(path, 100)]
