"""Generations of one file: the newest under its name, older ones beside it, and which job wrote which.

A job that was killed may have ranks that still run, and save when another job has gone on from the same file.  So each
file names the job that wrote it, and each job remembers what it last read or wrote there: it may follow its own file,
or one of the job that it goes on from, and no other.  All functions are for rank 0.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mpi4py.MPI  # noqa: F401  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError, FileError
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.files import naming, ordinary, process_name
from pdgemm.support.text import in_bytes, in_seconds

_PREFIX = "pdgemm_"  # of the attributes that are not the caller's
_JOB, _NAME, _GENERATION = f"{_PREFIX}job", f"{_PREFIX}process", f"{_PREFIX}generation"
_CHECKSUM = f"{_PREFIX}checksum"
_MOST = 60_000  # bytes of an attribute; HDF5 takes no more than 64 KiB


class Token(NamedTuple):
    """Which job wrote a file, and its number, which grows with each save."""

    job: str
    generation: int


class Saved(NamedTuple):
    """What `load_all` returns: matrices and attributes by their names, and the number of the generation."""

    matrices: dict[str, DistMatrix]
    attrs: dict[str, Any]
    generation: int


class Generation(NamedTuple):
    """A file as it is found.   process : that wrote it, for people.   names : of its matrices."""

    path: Path
    token: Token
    process: str
    names: list[str]
    attrs: dict[str, Any]


@dataclass(frozen=True)
class SavedReport:
    """What `save_all` wrote.   bytes : of all matrices.   seconds : with checksums and the check."""

    path: str
    generation: int
    names: tuple[str, ...]
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"wrote {self.path}, generation {self.generation} ({', '.join(self.names)}: {in_bytes(self.bytes)}) in "
            f"{in_seconds(self.seconds)}, {in_bytes(self.bytes / max(self.seconds, 1e-9))}/s"
        )


_myself = uuid.uuid4().hex
_last: dict[str, Token] = {}  # by the file: what this job has read or written there


def next_token(path: Path) -> Token:
    """Return the token of the next file.  Raises FileError where another job went on from it meanwhile.

    The caller holds the lock of the file.
    """
    there = next((x for x in [path, *older(path)] if x.exists()), None)
    if there is None:
        return Token(_myself, 1)
    found = inspect(there)
    last = _last.get(os.path.realpath(path))
    if last is not None and found.token.job not in (_myself, last.job):
        raise FileError(
            f"{path}: {found.process} has saved generation {found.token.generation} since this job was at "
            f"generation {last.generation}: it was left like that, and this job should end"
        )
    return Token(_myself, found.token.generation + 1)


def remember(path: Path, token: Token) -> None:
    """From now on this job goes on from this file."""
    _last[os.path.realpath(path)] = token


def older(path: Path) -> list[Path]:
    """Return the files of older generations, the newest first."""
    numbered = [(x.name.rpartition(".")[2], x) for x in path.parent.glob(f"{literal(path.name)}.*")]
    return [x for _, x in sorted((int(number), x) for number, x in numbered if number.isascii() and number.isdigit())]


def keep(path: Path, count: int) -> None:
    """Keep the file as an older generation, so that there will be `count` when it is replaced; remove the others."""
    found = older(path)
    if path.exists() and not (found and path.samefile(found[0])):  # a job may have been ended right here
        found.insert(0, path)
    for number in range(len(found), 0, -1):
        file, name = found[number - 1], path.with_name(f"{path.name}.{number}")
        if number >= count:
            if file != path:
                file.unlink()
        elif file == path:
            linked(path, name)
        else:
            file.replace(name)


def linked(path: Path, name: Path) -> None:
    """Give a file a second name."""
    try:
        os.link(path, name)
    except OSError:  # the file system has no such names
        shutil.copyfile(path, name)


def literal(name: str) -> str:
    """Return a pattern that this name alone matches."""
    return "".join(f"[{x}]" if x in "*?[" else x for x in name)


def create(path: Path, token: Token, attrs: Mapping[str, Any]) -> None:
    """Create a file with attributes, and no matrices yet."""
    made_by = {_JOB: token.job, _GENERATION: token.generation, _NAME: process_name()}
    with h5py.File(path, "w") as file:
        file.attrs.update({f"{_PREFIX}version": pdgemm.__version__, **made_by, **attrs})


def check_attrs(attrs: Mapping[str, Any]) -> None:
    """Raise ArgumentError for attributes that cannot be saved, or would not come back as they are."""
    for name, value in attrs.items():
        if not isinstance(name, str) or not name or name.startswith(_PREFIX) or "\0" in name:
            raise ArgumentError(f"attrs: {name!r} is no name; names are strings that do not begin with {_PREFIX!r}")
        array = np.asarray(value)
        fits = array.nbytes <= _MOST and not (isinstance(value, str) and "\0" in value)
        if not (isinstance(value, str) or array.dtype.kind in "biufc") or not fits:
            what = f"{type(value).__name__} of {in_bytes(array.nbytes)}" if array.nbytes > _MOST else f"{value!r:.60}"
            raise ArgumentError(
                f"attrs[{name!r}] is {what}; it must be a number, a string, or an array of numbers, of at most "
                f"{in_bytes(_MOST)}"
            )


def inspect(path: Path) -> Generation:
    """Return what a file of `save_all` holds, without its elements.  Raises FileError."""
    with naming(path):
        with open(path, "rb", opener=ordinary):
            pass
        if not h5py.is_hdf5(path):
            raise FileError(f"{path} is not an HDF5 file")
        with h5py.File(path, "r") as file:
            attrs = {name: _plain(value) for name, value in file.attrs.items()}
            try:
                token = Token(str(attrs[_JOB]), int(attrs[_GENERATION]))
            except (KeyError, TypeError, ValueError):
                raise FileError(f"{path} was not written by save_all") from None
            names = list[str]()
            file.visititems(lambda name, item: names.append(name) if _CHECKSUM in item.attrs else None)
            mine = {name: value for name, value in attrs.items() if not name.startswith(_PREFIX)}
            return Generation(path, token, str(attrs.get(_NAME, "another process")), names, mine)


def damage(path: Path) -> str:
    """Return why HDF5 cannot open a file; nothing if it can."""
    try:
        h5py.File(path, "r").close()
    except OSError as error:
        return " ".join(str(error).split())
    return ""


def found(path: Path) -> tuple[list[Generation], list[str]]:
    """Return the generations that can be read, the newest first, and why others cannot."""
    there, bad = list[Generation](), list[str]()
    for file in [path, *older(path)]:
        try:
            there.append(inspect(file))
        except FileError as error:
            bad.append(str(error))
    return there, bad


def _plain(value: Any) -> Any:
    """Return an attribute as Python has it: an array of no dimensions as a number."""
    with suppress(AttributeError):
        return value.item() if np.ndim(value) == 0 and not isinstance(value, str) else value
    return value
