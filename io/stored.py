"""Inspection of a dataset before it is read or replaced: the file with its bytes, their offset, layout and type.

A name may lead through external links into another file, and a dataset may store its bytes in other files: a virtual
dataset, or external raw storage.  So file, layout, offset and type are those of the object that a name resolves to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mpi4py.MPI  # noqa: F401  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

from pdgemm.algorithms.protection.checksum import is_comparable
from pdgemm.errors import ArgumentError, FileError, LayoutError
from pdgemm.support.file_states import State, check_ordinary, settled, state, state_of
from pdgemm.support.files import naming

_MOST_LINKS = 16  # links in one name, as in HDF5
_MOST_NAMES = 10  # names of datasets in a message
_MOST_CHUNK = 1 << 28  # bytes of the largest chunk that is read as a whole

CHANGED = "was changed while it was read; load it when no other program writes to it"  # said of a file or a dataset

Seen = set[tuple[Path, State | None]]
Object = tuple[int, int, int]  # identity of a dataset: device and inode of its file, address in that file


class Stored(NamedTuple):
    """The properties of a dataset, as rank 0 has inspected it.

    extents   : the extents of the axes; a dataset of one dimension has a second axis of extent 1.
    ndim      : dimensions of the dataset.
    file      : the file that the name resolves to.
    offset    : the byte offset in `file`, if the elements are contiguous and stored as NumPy holds them in memory.
    unit      : indices along each of these axes that are read together.
    scattered : the bytes are in external files, or in other datasets.
    states    : the states of all files with bytes of the dataset, or with a link to it, to detect changes.
    object    : the identity of this dataset, whatever names lead to it.
    objects   : the identities of this dataset and of all datasets that hold its elements, the sources of a virtual one.
    """

    extents: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int | None
    states: Seen
    object: Object
    objects: set[Object]
    ndim: int = 2
    unit: tuple[int, ...] = (1, 1)
    scattered: bool = False
    checksum: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix that the dataset is; of several dimensions, with `first_axes` as rows."""
        axes = first_axes(self.extents)
        return prod(self.extents[:axes]), prod(self.extents[axes:])


class Old(NamedTuple):
    """A dataset that is to be replaced: its `object` as in Stored, and whether pdgemm wrote it."""

    object: Object
    by_pdgemm: bool


class Found(NamedTuple):
    """The object that a name resolves to.

    file  : the file that the name starts in.
    item  : the object; None if no object has the name.
    other : if the name leads through external links, the last file, even if it does not exist; otherwise None.
    """

    file: h5py.File
    item: Any
    other: Path | None


def file_and_name(path: str | Path, name: str | None) -> tuple[Path, str]:
    """Return the file and the name of a dataset.   path : with name None, FILE:/DATASET, as on the command line."""
    file, _, inside = os.fspath(path).rpartition(":") if name is None else (path, "", name)
    if not isinstance(inside, str) or not inside or not file:
        raise ArgumentError(
            "name a dataset by 'FILE:/DATASET', or by its file and its name, and pass the grid after these arguments: "
            f'{os.fspath(path)!r}, "x", grid'
        )
    check_names(Path(file), inside)
    return Path(file), inside


def check_names(path: Path, name: str) -> None:
    """Raise FileError for names that HDF5 and MPI cannot take."""
    try:
        spelt = os.fsencode(path) + name.encode()  # file names may be undecodable
    except UnicodeEncodeError:
        spelt = b"\0"
    if b"\0" in spelt:  # HDF5 would truncate the name at the NUL
        raise FileError(f"{f'{path}:{name}'!a} is not the name of a dataset: names have no NUL or lone surrogate")


def stored_dataset(path: Path, name: str) -> Stored:
    """Return the properties of the dataset that a name resolves to."""
    return stored_datasets(path, [name])[name]


def stored_datasets(path: Path, names: Sequence[str]) -> dict[str, Stored]:
    """Return the properties of datasets of one file by their names; the file is opened once.

    Their `states` are those of all files that any of the names leads into.
    """
    for name in names:
        check_names(path, name)
    if not path.exists():
        raise FileError(f"{path}: no such file")
    seen: Seen = set()
    with ExitStack() as stack:
        file = stack.enter_context(_opened(path, seen))
        return {name: _properties(path, name, _target(file, path, name, seen, stack), seen) for name in names}


def _properties(path: Path, name: str, target: Found, seen: Seen) -> Stored:
    """Return the properties of the object that a name of an open file resolves to.  Raises FileError or LayoutError."""
    file, dataset, other = target
    if isinstance(dataset, h5py.Group):
        raise FileError(f"{path}:{name} is a group; it has {_contents(dataset) or 'no datasets'}")
    if not isinstance(dataset, h5py.Dataset):
        here = f"the name leads into {other}" if other else f"it has {_contents(file) or 'none'}"
        raise FileError(f"{path} has no dataset {name}; {here}")
    if not dataset.ndim:
        raise LayoutError(f"{path}:{name} is neither a matrix nor a vector: its shape is {dataset.shape}")
    what, dtype = f"{path}:{name}", dataset.dtype
    objects = _checked_sources(dataset, what, seen)
    recorded = read_attribute(dataset, "pdgemm_checksum")
    return Stored(
        extents=(*dataset.shape, 1)[: max(2, dataset.ndim)],
        dtype=np.dtype(dtype.newbyteorder("=").str) if dtype.kind in "biufc" else dtype,
        file=other or path,
        offset=_offset(dataset, what),
        unit=access_unit(dataset),
        scattered=dataset.is_virtual or bool(dataset.external),
        checksum=None if recorded is None else str(recorded),
        states=seen,
        object=_object(dataset),
        objects=objects,
        ndim=dataset.ndim,
    )


def check_verifiable(stored: Stored, what: str) -> None:
    """Raise FileError where the elements of a dataset cannot be compared with a checksum."""
    if stored.checksum is None:
        raise FileError(f"{what} carries no checksum to verify")
    if not is_comparable(stored.checksum):
        raise FileError(f"{what} carries a checksum of another version of pdgemm: load it without verify")


def check_checksum(stored: Stored, what: str, computed: str) -> None:
    """Raise FileError where the elements that were read from a dataset have another checksum."""
    if computed != stored.checksum:
        raise FileError(f"{what} is damaged: its checksum is {computed}, recorded was {stored.checksum}")


def check_unchanged(what: str, stored: Stored) -> None:
    """Raise FileError if a file has changed since it was inspected."""
    if (file := changed_file(stored)) is not None:
        raise FileError(f"{'' if what == str(file) else f'{what}: '}{file} {CHANGED}")


def changed_file(stored: Stored) -> Path | None:
    """Return a file whose contents, owner, mode, times or links changed since its inspection; None if no file did.

    Equal contents cannot be recognised from a state, because a program that writes to a file may reset the file's time.
    """
    return next((file for file, before in stored.states if state(file) != before), None)


@contextmanager
def followed(path: Path, name: str, seen: Seen) -> Iterator[Found]:
    """Open a file, and the files that a name leads into, link by link, since HDF5 would block if it opened a FIFO.

    seen : receives the states of all these files.
    """
    with ExitStack() as stack:
        yield _target(stack.enter_context(_opened(path, seen)), path, name, seen, stack)


def _target(first: h5py.File, path: Path, name: str, seen: Seen, stack: ExitStack) -> Found:
    """Return the object that a name of an open file resolves to.   stack : closes the files that are opened for it."""
    file, here, parts, links, other = first, first["/"], name.split("/")[::-1], 0, None
    while parts and here is not None:
        part = parts.pop()
        if part in ("", "."):
            continue
        link = here.get(part, getlink=True) if isinstance(here, h5py.Group) else None
        if not isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            here = here.get(part) if link else None
            continue
        links += 1
        if links > _MOST_LINKS:  # a cycle
            raise FileError(f"{path}: {name} leads through too many links")
        parts += link.path.split("/")[::-1]
        if isinstance(link, h5py.ExternalLink):
            there = _search(link.filename, file, "HDF5_EXT_PREFIX")
            other = there or Path(str(link.filename))
            file = stack.enter_context(_opened(there, seen)) if there else None
            here = file and file["/"]
        elif link.path.startswith("/"):
            here = file["/"]
    return Found(first, here, other)


def _opened(path: Path, seen: Seen) -> h5py.File:
    """Open an HDF5 file, and add its states before and after the opening to `seen`."""
    with naming(path):
        before = settled(path)  # raises OSError for anything but a regular file
        try:
            file = h5py.File(path, "r", driver="sec2")  # the handle of this driver is a file descriptor
        except OSError:
            if not h5py.is_hdf5(path):
                raise FileError(f"{path} is not an HDF5 file") from None
            raise
        seen.update([(path, before), (path, state_of(file.id.get_vfd_handle()))])
        return file


def _search(name: str, file: h5py.File, variable: str) -> Path | None:
    """Return the file that a link or virtual dataset names, by the search path of HDF5; None if no such file exists."""
    folder, real = (str(Path(x).parent) for x in (file.filename, os.path.realpath(str(file.filename))))
    prefixes = [x.replace("${ORIGIN}", folder) for x in os.environ.get(variable, "").split(":") if x]
    tried = [Path(name)] if Path(name).is_absolute() else []
    tried += [Path(place, Path(name).name if tried else name) for place in (*prefixes, folder, "", real)]
    for there in filter(os.path.exists, tried):
        with naming(there):
            check_ordinary(there.stat())
            if h5py.is_hdf5(there):  # HDF5 skips files of other formats
                return there
    return None


def check_target(path: Path, name: str) -> bool:
    """Raise FileError for a name that cannot be saved to; return whether the file holds only that dataset."""
    check_names(path, name)
    if not name.strip("/."):
        raise FileError(f"{path}: {name!r} is not the name of a dataset")
    if not path.exists():
        return True
    with followed(path, name, set()) as (file, old, other):
        if other:
            raise FileError(f"{path}: {name} leads by a link into another file, {other}: save to that file")
        if old is not None and not isinstance(old, h5py.Dataset):
            raise FileError(f"{path}: {name} exists already, and is not a dataset")
        parts = [x for x in name.split("/") if x not in ("", ".")]
        for above in map("/".join, (parts[:count] for count in range(1, len(parts)))):
            if above not in file and not file.get(above, getlink=True):
                break
            if not isinstance(file.get(above), h5py.Group):
                raise FileError(f"{path}: {name} cannot be saved there, because {above} is not a group")
        alone = old is not None and list(file) == [name.strip("/")]
        return alone and not (file.attrs or file.userblock_size or file["/"].id.get_comment(b"."))


def old(path: Path, name: str) -> Old | None:
    """Return the dataset that a name leads to now; None if no object has the name."""
    if not path.exists():
        return None
    with followed(path, name, set()) as (_, item, _):
        return None if item is None else Old(_object(item), "pdgemm_checksum" in item.attrs)


def _object(item: Any) -> Object:
    file = state_of(item.file.id.get_vfd_handle())
    return file.device, file.inode, h5py.h5o.get_info(item.id).addr


def access_unit(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Return the indices along each axis to be accessed together: a chunk, unless it is too large."""
    ones = (1,) * max(2, dataset.ndim)
    unit = (*(dataset.chunks or ()), *ones)[: len(ones)]
    return unit if prod(unit) * dataset.dtype.itemsize <= _MOST_CHUNK else ones


def first_axes(extents: Sequence[int]) -> int:
    """Return how many first axes are the rows of the most even matrix; recorded checksums depend on this number."""
    return min(range(1, len(extents)), key=lambda k: max(prod(extents[:k]), prod(extents[k:])))


def _offset(dataset: h5py.Dataset, what: str) -> int | None:
    """Return the byte offset of the elements if they are contiguous and stored as NumPy holds them, else None.

    Raises FileError if the file ends before the elements do.
    """
    in_one_piece = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and not dataset.external
    as_in_memory = in_one_piece and dataset.dtype.kind in "biufc" and dataset.dtype.isnative
    # an HDF5 type may differ from the NumPy type: other exponents, padding, an enumeration
    if not as_in_memory or dataset.id.get_type() != h5py.h5t.py_create(np.dtype(dataset.dtype.str)):
        return None
    offset: int | None = dataset.id.get_offset()  # in the file, user block included; None before allocation
    end = state_of(dataset.file.id.get_vfd_handle()).size
    if offset is not None and offset + dataset.nbytes > end:
        raise FileError(f"{what} is truncated: it ends at byte {offset + dataset.nbytes}, its file at {end}")
    return offset


def _checked_sources(dataset: h5py.Dataset, what: str, seen: Seen, depth: int = 0) -> set[Object]:
    """Return the identities of all datasets that hold elements of a dataset, itself among them.

    Raises FileError if a file with elements is missing; HDF5 itself would return fill values in their place.
    """
    if depth > _MOST_LINKS:
        raise FileError(f"{what} is a virtual dataset that contains itself")
    folder, objects = Path(dataset.file.filename).parent, {_object(dataset)}
    wanted = dataset.nbytes
    for name, offset, size in dataset.external or ():
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(folder))
        file, here = Path(prefix, name), min(size, wanted)
        with naming(file):
            now = settled(file)
        if now is None or now.size < offset + here:
            raise FileError(f"{what} has {here} bytes at byte {offset} of {file}, which is missing or too short")
        wanted -= here
        seen.add((file, now))
    for part in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%b" in (part.file_name + part.dset_name).replace("%%", ""):
            raise FileError(f"{what} finds its sources by the pattern {part.file_name}:{part.dset_name}: copy it first")
        name, inner = (x.replace("%%", "%") for x in (part.file_name, part.dset_name))
        own = dataset.file
        there = Path(own.filename) if name == "." else _search(name, own, "HDF5_VDS_PREFIX")
        missing = FileError(f"{what} has elements in {name}:{inner}, which is missing or too small")
        if there is None:
            raise missing
        with followed(there, inner, seen) as (_, source, _):
            if not isinstance(source, h5py.Dataset) or not _covers(source, part):
                raise missing
            objects |= _checked_sources(source, what, seen, depth + 1)
    return objects


def _covers(source: h5py.Dataset, part: Any) -> bool:
    """Return whether the source has all elements that the virtual dataset maps."""
    if part.src_space.get_select_type() == h5py.h5s.SEL_ALL:
        return bool(source.size == part.vspace.get_select_npoints())
    try:
        _, last = part.src_space.get_select_bounds()
    except RuntimeError:  # an unlimited selection
        return True
    return source.ndim == len(last) and all(at < size for at, size in zip(last, source.shape))


def _contents(group: h5py.Group) -> str:
    """Return the names of the datasets of a file or a group, at most ten, and "..." in place of further names."""
    datasets, above = list[str](), (group.name or "").rstrip("/")

    def visit(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            datasets.append(f"{above}/{name} ({' x '.join(map(str, item.shape or ()))} {item.dtype})")
        return True if len(datasets) > _MOST_NAMES else None  # anything but None ends the visit

    group.visititems(visit)
    return ", ".join([*datasets[:_MOST_NAMES], *["..."] * (len(datasets) > _MOST_NAMES)])


# ------------------------------------------------------------------ attributes
# Strings of variable length are in a global heap of the file, and HDF5 2.0.0 reads for ever in a heap with a flipped
# bit in its free space.  So strings have a fixed length.
def write_attributes(item: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes of a file, group or dataset."""
    for name, value in attributes.items():
        if isinstance(value, str):
            _write_text(item, name, value)
        else:
            item.attrs[name] = value


def _write_text(item: Any, name: str, value: str) -> None:
    """Set one attribute to the same bytes as `item.attrs.create`, in a quarter of the time."""
    spelt = np.array(value.encode(errors="surrogateescape") or b"\0")  # file names may be undecodable
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(spelt.itemsize)
    kind.set_strpad(h5py.h5t.STR_NULLPAD)
    kind.set_cset(h5py.h5t.CSET_UTF8)
    if h5py.h5a.exists(item.id, name.encode()):
        h5py.h5a.delete(item.id, name.encode())
    h5py.h5a.create(item.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(spelt, mtype=kind)


def read_attribute(item: Any, name: str) -> Any:
    """Return an attribute; a string of fixed or variable length as `str`; None if the attribute is missing."""
    value = item.attrs.get(name)
    return value.decode(errors="surrogateescape") if isinstance(value, np.bytes_) else value
