"""Generations of one file: the newest has the file's name, older ones are the files `name.1`, `name.2` beside it.

Ranks of a killed job may still run, and may save after another job has resumed from that file.  So each file names
the job that wrote it, and each job remembers the generation that it last read or wrote.  After that, the job replaces
only its own generations, and generations of the job whose file it read.  Only rank 0 opens the files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mpi4py.MPI  # noqa: F401  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError, FileError
from pdgemm.instrument.run_report import RunReport
from pdgemm.io.stored import read_attribute, write_attributes
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.file_states import State, ordinary, state
from pdgemm.support.files import LOST, check_named, check_replaced, naming, process_name, rename
from pdgemm.support.text import in_bytes, in_seconds

_PREFIX = "pdgemm_"  # prefix of the attributes that pdgemm adds to those of the caller
_JOB, _NAME, _GENERATION = f"{_PREFIX}job", f"{_PREFIX}process", f"{_PREFIX}generation"
_CHECKSUM = f"{_PREFIX}checksum"  # the checksum of one matrix
_CONTENTS = f"{_PREFIX}contents"  # the hash of all other attributes, and of the properties of the matrices
_MOST = 60_000  # bytes of the largest attribute; the limit of HDF5 is 64 KiB
_FIRST = 1 << 20  # bytes at the beginning of a file, which contain the names of these attributes


class DamagedError(FileError):
    """A file that `save_all` has written cannot be read."""


class OtherFileError(FileError):
    """A file was not written by `save_all`."""


class Token(NamedTuple):
    """The job that wrote a file, and the number of the file's generation; each save has a larger number."""

    job: str
    generation: int


class Matrix(NamedTuple):
    """The recorded properties of one matrix.   name : as HDF5 lists the dataset.   dtype : as NumPy writes the type."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str


class Saved(NamedTuple):
    """The result of `load_all`: matrices and attributes by their names, and the number of the generation."""

    matrices: dict[str, DistMatrix]
    attrs: dict[str, Any]
    generation: int


class Generation(NamedTuple):
    """One readable file of `save_all`.   process : the file's writer, for messages.   names : names of the matrices.

    others : the datasets that another program has added.
    """

    path: Path
    token: Token
    process: str
    names: list[str]
    attrs: dict[str, Any]
    others: list[str]


_myself = uuid.uuid4().hex
_last: dict[str, Token] = {}  # the generation that this job last read or wrote, by file
_rejected = set[State | None]()  # states of damaged files


def text_of_saved(report: RunReport) -> str:
    """Return the report of `save_all` as text: the bytes of all matrices, and the seconds, including all checks."""
    return (
        f"wrote {report.path}, generation {report.generation} ({', '.join(report.names)}: {in_bytes(report.bytes)}) in "
        f"{in_seconds(report.seconds)}, {in_bytes(report.bytes / max(report.seconds, 1e-9))}/s"
    )


def same_job(comm: Any) -> None:
    """Broadcast the name of the job, so that any of these ranks may be rank 0 of a later save.  Collective."""
    global _myself
    _myself = comm.bcast(_myself)


def next_token(path: Path, overwrite: bool = False) -> Token:
    """Return the token of the next generation.  Raises FileError if another job has saved since this job read or saved.

    Damaged generations are skipped, as in `load_all`.  If `overwrite` is False, ArgumentError is raised for a file that
    is not, or may not be, a generation.  The caller holds the lock of the file.
    """
    last, there = _last.get(os.path.realpath(path)), None
    for file in (x for x in [path, *older(path)] if x.exists() and state(x) not in _rejected):
        try:
            there = inspect(file)
            if file == path:
                why = f"has datasets that pdgemm did not write, {', '.join(there.others)}"
                check_replaced(path, not there.others, overwrite, why)
            break
        except (DamagedError, OtherFileError) as error:
            other = isinstance(error, OtherFileError)
            if other and file != path:
                raise
            if other or (file == path and last is None and not _is_ours(path)):  # it may belong to any program
                check_replaced(path, False, overwrite, str(error).removeprefix(f"{path} "))
            reject(file)
    if there is not None and last is not None and there.token.job not in (_myself, last.job):
        raise FileError(
            f"{path}: {there.process} has saved generation {there.token.generation} since this job was at "
            f"generation {last.generation}: the file was not replaced, and this job should end"
        )
    return Token(_myself, 1 + max([x.generation for x in (there and there.token, last) if x is not None], default=0))


def remember(path: Path, token: Token) -> None:
    """Record that this job continues from this generation of the file."""
    _last[os.path.realpath(path)] = token


def reject(path: Path) -> None:
    """Record that this file is damaged: a save may replace it, and does not keep it as an older generation."""
    with suppress(FileError):
        _rejected.add(state(path))


def older(path: Path) -> list[Path]:
    """Return the files of older generations, the newest first: `path.1`, `path.2`...; single numbers may be missing."""
    files, missing, number = list[Path](), 0, 0
    while missing < 2 and path.name:  # a job that was killed while it renamed the files leaves out one number
        number += 1
        file = path.with_name(f"{path.name}.{number}")
        missing = 0 if os.path.lexists(file) else missing + 1
        files += [file] if not missing else []
    return files


def keep(path: Path, count: int) -> None:
    """Give the file the second name `path.1`, and older generations the next numbers, if `count` is more than 1.

    Raises FileError, before any file is renamed, if one of these names belongs to a file of another kind.
    """
    there = older(path) if count > 1 else []
    for file in there:
        if not (file.is_file() and (h5py.is_hdf5(file) or _is_ours(file))):
            raise FileError(f"{file} was not written by save_all, and is in the way of older generations: move it")
    good = [x for x in [path, *there] if x.exists() and state(x) not in _rejected]
    if count < 2 or (len(good) > 1 and good[0] == path and path.samefile(good[1])):  # an earlier job was killed here
        return
    for number in range(len(good), 0, -1):
        file, name = good[number - 1], path.with_name(f"{path.name}.{number}")
        if file == path:
            name.unlink(missing_ok=True)
            linked(path, name)
        else:
            rename(file, name)


def trim(path: Path, count: int) -> None:
    """Remove the oldest generations, until `count` are left.  The newest must have the name of the file already."""
    for file in older(path)[count - 1 :]:
        with suppress(FileError, OSError):
            if _is_ours(file):
                file.unlink()


def linked(path: Path, name: Path) -> None:
    """Give a file a second name."""
    try:
        os.link(path, name)
    except OSError:  # the file system has no hard links
        shutil.copy2(path, name)
    check_named(name, state(path))


def create(path: Path, token: Token, attrs: Mapping[str, Any], matrices: Iterable[Matrix]) -> None:
    """Create a file with its attributes, but without matrices.   matrices : the matrices that are added later."""
    origin = {f"{_PREFIX}version": pdgemm.__version__, _NAME: process_name()}
    origin |= {_JOB: token.job, _GENERATION: token.generation}
    contents = _hash({**origin, **attrs}, matrices)
    with h5py.File(path, "w") as file:
        write_attributes(file, {_CONTENTS: contents, **origin, **attrs})


def plain_name(name: str) -> str:
    """Return the name of a dataset as HDF5 lists it."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def check_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes as they are saved.  Raises ArgumentError for a value that a load would change."""
    checked = dict[str, Any]()
    for name, value in attrs.items():
        if not isinstance(name, str) or not name or name.startswith(_PREFIX) or "\0" in name:
            raise ArgumentError(f"attrs: {name!r} is not a name; names are strings that do not begin with {_PREFIX!r}")
        try:
            array = np.asarray(value)
        except ValueError:  # a list of rows of different lengths
            array = np.empty(0, object)
        numbers, large = array.dtype.kind in "biufc" and not np.ma.isMaskedArray(value), array.nbytes > _MOST
        valid = "\0" not in value if isinstance(value, str) else numbers
        if large or not valid:
            what = f"{type(value).__name__} of {in_bytes(array.nbytes)}" if large else f"{value!r:.60}"
            raise ArgumentError(
                f"attrs[{name!r}] is {what}; it must be a number, a string, or an array of numbers, of at most "
                f"{in_bytes(_MOST)}"
            )
        checked[name] = str(value) if isinstance(value, str) else value
    return checked


def inspect(path: Path) -> Generation:
    """Return the contents of a file of `save_all`, without the elements of the matrices.

    Raises DamagedError; FileError where the file cannot be opened now, or was not written by `save_all`.
    """
    with naming(path):
        with open(path, "rb", opener=ordinary):
            pass
        try:
            if not h5py.is_hdf5(path):
                raise DamagedError(f"{path} is not an HDF5 file")
            with h5py.File(path, "r") as file:
                return _parsed(path, file)
        except FileError:
            raise
        except Exception as bad:  # h5py raises exceptions of many types for a damaged file
            if isinstance(bad, OSError) and bad.errno:  # it may be a lock, or a fault of the file system
                raise
            raise DamagedError(f"{path} is damaged: {' '.join(str(bad).split())}") from None


def _parsed(path: Path, file: h5py.File) -> Generation:
    """Return the contents of an open file.  For a damaged file, exceptions of any type may be raised."""
    attrs, matrices, others = {name: read_attribute(file, name) for name in file.attrs}, list[Matrix](), list[str]()

    def visit(name: str, item: Any) -> None:
        if _CHECKSUM in item.attrs:
            # an HDF5 type may differ from the NumPy type, for example in the bias of the exponents
            kind = item.dtype.str if item.id.get_type() == h5py.h5t.py_create(item.dtype) else "another"
            matrices.append(Matrix(name, tuple(item.shape), kind, str(read_attribute(item, _CHECKSUM))))
        elif isinstance(item, h5py.Dataset):
            others.append(name)

    file.visititems(visit)
    mine = {name: value for name, value in attrs.items() if not name.startswith(_PREFIX)}
    if _CONTENTS not in attrs and not _is_ours(path):
        raise OtherFileError(f"{path} was not written by save_all")
    if attrs.pop(_CONTENTS, None) != _hash(attrs, matrices):
        raise DamagedError(f"{path} is damaged: its attributes, or its matrices, are not those that were saved")
    token = Token(str(attrs[_JOB]), int(attrs[_GENERATION]))
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in mine.items()}
    return Generation(path, token, str(attrs.get(_NAME, "another process")), [x.name for x in matrices], plain, others)


def check_held(partial: Path, token: Token, names: Iterable[str]) -> None:
    """Raise FileError if a new file, read back, has another token, or matrices of other names."""
    try:
        held = inspect(partial)
    except DamagedError as error:
        raise FileError(f"{partial}: {LOST}") from error
    if held.token != token or {*held.names} != {plain_name(name) for name in names}:
        raise FileError(f"{partial}: {LOST}")


def _is_ours(path: Path) -> bool:
    """Return whether `save_all` wrote a file, perhaps damaged: the file is empty, or its start names our attributes."""
    with open(path, "rb", opener=ordinary) as file:
        first = file.read(_FIRST)
    return not first or sum(name.encode() in first for name in (_JOB, _NAME, _GENERATION, _CONTENTS)) > 1


def _hash(attrs: Mapping[str, Any], matrices: Iterable[Matrix]) -> str:
    """Return a hash of the attributes, with values as a load returns them, and of the properties of the matrices."""
    values = [(name, np.asarray(value)) for name, value in sorted(attrs.items())]
    plain = [(name, value.dtype.str, value.shape, value.tolist()) for name, value in values]
    known = repr((plain, [tuple(x) for x in sorted(matrices)]))
    return hashlib.blake2b(known.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def has(path: Path, name: str, shape: tuple[int, int], dtype: np.dtype) -> bool:
    """Return whether a file holds this dataset, and is not truncated.  Raises OSError if it cannot be read now."""
    try:
        with h5py.File(path, "r") as file:  # HDF5 compares the size of the file with the recorded one
            return (*file[name].shape, 1)[:2] == shape and bool(file[name].dtype == dtype)
    except FileNotFoundError:
        return False
    except Exception as bad:
        if isinstance(bad, OSError) and bad.errno:
            raise
        return False


def saved_generations(path: Path) -> tuple[list[Generation], list[str]]:
    """Return the generations that can be read, the newest first, and the error messages of the others."""
    there, bad = list[Generation](), list[str]()
    for file in [path, *older(path)]:
        try:
            there.append(inspect(file))
        except FileError as error:
            bad.append(str(error))
            if isinstance(error, DamagedError):
                reject(file)
    return there, bad


def is_there(generation: Generation) -> bool:
    """Return whether the file still holds this generation.  Numbers only grow: a file never returns to an old one."""
    with suppress(FileError):
        return inspect(generation.path).token == generation.token
    return False
