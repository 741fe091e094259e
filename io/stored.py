"""What there is to know about a dataset before it is read or replaced: which file has its bytes, where, in what form.

A name may lead through links into another file, and a dataset may have its bytes in others: external links, virtual
datasets, external raw storage.  So file, layout, place and type are asked of the object that a name leads to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mpi4py.MPI  # noqa: F401  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

from pdgemm.errors import FileError, LayoutError
from pdgemm.files import State, check_ordinary, state

_MOST_LINKS = 16  # soft links in one name, as in HDF5
_MOST_CHUNK = 1 << 28  # bytes of a chunk that is read as one


class Stored(NamedTuple):
    """What rank 0 learns about a dataset.

    file      : the one that the name leads to.
    offset    : where its bytes lie in `file`, if they lie in one piece and as NumPy has them in memory.
    unit      : rows and columns that are read together.
    scattered : its bytes lie in files beside HDF5's own, or in other datasets.
    states    : of all files that have some of its bytes, so that a change is seen.
    """

    shape: tuple[int, int]
    dtype: np.dtype
    file: Path
    offset: int | None
    unit: tuple[int, int]
    scattered: bool
    checksum: str | None
    states: dict[Path, State | None]


def check_names(path: Path, name: str) -> None:
    """Can both be handed to HDF5 and MPI?"""
    try:
        spelt = os.fsencode(path) + name.encode()  # the name of a file may be any bytes
    except UnicodeEncodeError:
        spelt = b"\0"
    if b"\0" in spelt:  # at which HDF5 would end the name
        raise FileError(f"{f'{path}:{name}'!a} names no dataset: no name has a NUL or a lone surrogate in it")


def inspect(path: Path, name: str) -> Stored:
    """A dataset of a file, wherever its name leads."""
    check_names(path, name)
    with h5py.File(path, "r") as file:
        elsewhere(file, name)
        dataset = file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            other = elsewhere(file, name)
            here = f"the name leads into {other}" if other else f"it has {_contents(file) or 'none'}"
            raise FileError(f"{path} has no dataset {name}; {here}")
        if dataset.ndim != 2:
            raise LayoutError(f"{path}:{name} is not a matrix: its shape is {dataset.shape}")
        what, dtype = f"{path}:{name}", dataset.dtype
        real = path if _same_file(dataset, file) else Path(dataset.file.filename)
        others = list(_other_files(dataset, what))
        states = {x: state(x) for x in (path, real, *others)}
        recorded = dataset.attrs.get("pdgemm_checksum")
        return Stored(
            shape=dataset.shape,
            dtype=np.dtype(dtype.newbyteorder("=").str) if dtype.kind in "biufc" else dtype,
            file=real,
            offset=_offset(dataset, what, real.stat().st_size),
            unit=unit(dataset),
            scattered=dataset.is_virtual or bool(dataset.external),
            checksum=None if recorded is None else str(recorded),
            states=states,
        )


def check_unchanged(what: str, stored: Stored) -> None:
    """Are all files that were read those that were inspected?"""
    for file, before in stored.states.items():
        if state(file) != before:
            raise FileError(f"{what}: {file} was changed while it was read; load it again when nobody writes to it")


def elsewhere(file: h5py.File, name: str) -> str | None:
    """The other file that a name leads into by an external link, anywhere on its way; None if there is none."""
    here, parts, followed = file, name.split("/")[::-1], 0
    while parts and isinstance(here, h5py.Group):
        part = parts.pop()
        if part in ("", "."):
            continue
        link = here.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            for place in (Path(link.filename), Path(here.file.filename).parent / link.filename):
                if place.exists():
                    check_ordinary(place.stat())  # HDF5 would wait for a FIFO
            there = here.get(part)
            return str(link.filename if there is None else there.file.filename)
        if isinstance(link, h5py.SoftLink):
            followed += 1
            if followed > _MOST_LINKS:  # a circle
                return None
            here = file if link.path.startswith("/") else here
            parts += link.path.split("/")[::-1]
        else:
            here = here.get(part)
    return None


def check_target(path: Path, name: str) -> bool:
    """Refuse a name that no dataset may be given; is the one that stands there now all that the file holds?"""
    check_names(path, name)
    if not name.strip("/."):
        raise FileError(f"{path}: {name!r} is not the name of a dataset")
    if not path.exists():
        return True
    with h5py.File(path, "r") as file:
        if other := elsewhere(file, name):
            raise FileError(f"{path}: {name} leads by a link into another file, {other}: save there, by its name there")
        old = file.get(name)
        if old is not None and not isinstance(old, h5py.Dataset):
            raise FileError(f"{path}: {name} is there already, as another kind of object")
        alone = old is not None and list(file) == [name.strip("/")]
        return alone and not (file.attrs or file.userblock_size or file["/"].id.get_comment(b"."))


def unit(dataset: h5py.Dataset) -> tuple[int, int]:
    """Rows and columns that are best read and written together: a chunk, unless it is too large."""
    rows, cols = dataset.chunks or (1, 1)
    return (rows, cols) if rows * cols * dataset.dtype.itemsize <= _MOST_CHUNK else (1, 1)


def _same_file(item: Any, file: h5py.File) -> bool:
    return bool(h5py.h5o.get_info(item.id).fileno == h5py.h5o.get_info(file.id).fileno)


def _offset(dataset: h5py.Dataset, what: str, end: int) -> int | None:
    """Where the elements lie in their file as they would in memory, or None."""
    in_one_piece = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and not dataset.external
    as_in_memory = in_one_piece and dataset.dtype.kind in "biufc" and dataset.dtype.isnative
    # what HDF5 has as a number need not be one of NumPy's: other exponents, padding, an enumeration
    if not as_in_memory or dataset.id.get_type() != h5py.h5t.py_create(np.dtype(dataset.dtype.str)):
        return None
    offset: int | None = dataset.id.get_offset()  # of the file, with its user block; None where nothing was written yet
    if offset is not None and offset + dataset.nbytes > end:
        raise FileError(f"{what} is cut short: it ends at byte {offset + dataset.nbytes}, its file at {end}")
    return offset


def _other_files(dataset: h5py.Dataset, what: str, depth: int = 0) -> Iterator[Path]:
    """The other files that hold elements of a dataset.  Where one is missing HDF5 would make them up in silence."""
    if depth > _MOST_LINKS:
        raise FileError(f"{what} has elements in itself")
    folder = Path(dataset.file.filename).parent
    wanted = dataset.nbytes
    for name, offset, size in dataset.external or ():
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(folder))
        file, here = Path(prefix, name), min(size, wanted)
        if not file.is_file() or file.stat().st_size < offset + here:
            raise FileError(f"{what} has {here} bytes at byte {offset} of {file}, which is missing or too short")
        wanted -= here
        yield file
    for part in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%b" in (part.file_name + part.dset_name).replace("%%", ""):
            raise FileError(f"{what} finds its sources by the pattern {part.file_name}:{part.dset_name}: copy it first")
        name, inner = (x.replace("%%", "%") for x in (part.file_name, part.dset_name))
        there = Path(dataset.file.filename) if name == "." else _source_file(name, folder)
        missing = FileError(f"{what} has elements in {name}:{inner}, which is missing or too small")
        if there is None:
            raise missing
        with h5py.File(there, "r") as opened:
            source = opened.get(inner)
            if not isinstance(source, h5py.Dataset) or not _covers(source, part):
                raise missing
            yield from (there, Path(source.file.filename))
            yield from _other_files(source, what, depth + 1)


def _source_file(name: str, folder: Path) -> Path | None:
    """The file of a virtual dataset's source, where HDF5 looks for it."""
    prefixes = [x for x in os.environ.get("HDF5_VDS_PREFIX", "").split(":") if x]
    places = [x.replace("${ORIGIN}", str(folder)) for x in prefixes] + [str(folder), "", os.path.realpath(folder)]
    tried = [Path(name)] if Path(name).is_absolute() else []
    tried += [Path(place, Path(name).name if tried else name) for place in places]
    return next((x for x in tried if x.is_file()), None)


def _covers(source: h5py.Dataset, part: Any) -> bool:
    """Has the source all elements that the virtual dataset takes from it?"""
    if part.src_space.get_select_type() == h5py.h5s.SEL_ALL:
        return bool(source.size == part.vspace.get_select_npoints())
    try:
        _, last = part.src_space.get_select_bounds()
    except RuntimeError:  # as many as there are
        return True
    return source.ndim == len(last) and all(at < size for at, size in zip(last, source.shape))


def _contents(file: h5py.File) -> str:
    """The datasets of a file, at most ten."""
    found: list[str] = []

    def visit(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            found.append(f"/{name} ({' x '.join(map(str, item.shape or ()))} {item.dtype})")
        return True if len(found) == 10 else None  # anything but None ends the visit

    file.visititems(visit)
    return ", ".join(found)
