"""The header of a safetensors file: the types, shapes and places of its tensors, whose bytes follow one another.

::

    8 bytes          n, the length of the header, little-endian
    n bytes          {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    the rest         the elements of the tensors, each row by row

The format: https://github.com/huggingface/safetensors.  The safetensors library checks all other rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, FileError
from pdgemm.io.atomic import check_header, create_with_header
from pdgemm.io.stored import CHANGED
from pdgemm.support.file_states import State, ordinary, settled, state, state_of
from pdgemm.support.files import LOST, naming

METADATA = "__metadata__"
WRITTEN_BY = rb'^.{8}\{"__metadata__":\{"written by":"pdgemm"'  # the beginning of a file of this package
_LONGEST = 100_000_000  # bytes of the longest header that the library reads
_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
DTYPE = {code: np.dtype(name) for code, name in _CODES.items()}
CODE = {dtype: code for code, dtype in DTYPE.items()}


class Tensor(NamedTuple):
    """A tensor of a file.   code : the format's name of its type.   offset : the byte at which its elements begin."""

    code: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The type of the elements.  Raises DTypeError where the package has no such type."""
        if self.code not in DTYPE:
            raise DTypeError(f"tensors of type {self.code} cannot be read; valid types are {', '.join(DTYPE)}")
        return DTYPE[self.code]

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape)) or 'one number'} {_CODES.get(self.code, self.code)}"


class Header(NamedTuple):
    """The header of a file: tensors and metadata by name.   state : the state of the file when the header was read."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    state: State


def safetensors_library() -> Any:
    """Return the safetensors library.  Raises ArgumentError where it is not installed."""
    try:
        return import_module("safetensors")
    except ImportError:
        raise ArgumentError("safetensors is not installed: pip install 'pdgemm[safetensors]'") from None


def read_header(path: Path) -> Header:
    """Return the header of a file after a check by the safetensors library.  Local.

    Raises FileError where the file is damaged, truncated or of another kind.
    """
    opened = safetensors_library()
    with naming(path), open(path, "rb", opener=ordinary) as file:
        current, before = state_of(file.fileno()), settled(path)
        try:
            with opened.safe_open(str(path), "numpy") as checked:
                metadata = checked.metadata() or {}
        except opened.SafetensorError as bad:
            raise FileError(f"{path} is not a safetensors file, or is damaged: {bad}") from None
        described = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    described.pop(METADATA, None)
    tensors = {
        name: Tensor(x["dtype"], tuple(x["shape"]), start + x["data_offsets"][0]) for name, x in described.items()
    }
    if current != before:
        raise FileError(f"{path} {CHANGED}")
    return Header(tensors, metadata, current)


def check_state(path: Path, header: Header) -> None:
    """Raise FileError if the file has changed since its header was read.  Local."""
    if state(path) != header.state:
        raise FileError(f"{path} {CHANGED}")


class NewFile(NamedTuple):
    """A file to be written.

    text : its header, with the 8 bytes of the length.   tensors : its tensors by name, with their offsets in the file.
    """

    text: bytes
    tensors: dict[str, Tensor]

    @property
    def elements(self) -> int:
        """The number of bytes of all elements."""
        return sum(x.nbytes for x in self.tensors.values())

    @property
    def size(self) -> int:
        return len(self.text) + self.elements

    def create(self, partial: Path) -> None:
        """Write the header, and reserve the space of the elements.  Local."""
        create_with_header(partial, self.text, self.elements)

    def check(self, path: Path, partial: Path) -> None:
        """Raise FileError where the file on the disk has another header or size, or is not valid.  Local."""
        check_header(path, partial, self.text, self.elements)
        try:
            read_header(partial)
        except FileError as bad:
            raise FileError(f"{path}: {LOST}: {bad}") from None


def new_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> NewFile:
    """Return a new file of these tensors, sorted by element size, the largest first, so that all are aligned.  Local.

    metadata : strings by name.   Raises ArgumentError where a name is invalid, or the header is too long.
    """
    texts = {"format": "pt"} if metadata is None else dict(metadata)
    texts = {"written by": "pdgemm"} | texts
    for name in (*tensors, *texts, *texts.values()):
        if not isinstance(name, str) or name.encode(errors="ignore").decode() != name:
            raise ArgumentError(f"names of tensors, and metadata, are strings, got {name!r}")
    if METADATA in tensors:
        raise ArgumentError(f"no tensor has the name {METADATA!r}: rename it")
    at, described, placed = 0, dict[str, Any](), dict[str, Tensor]()
    for name, x in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        described[name] = {"dtype": x.code, "shape": x.shape, "data_offsets": (at, at + x.nbytes)}
        placed[name], at = x._replace(offset=at), at + x.nbytes
    text = json.dumps({METADATA: texts, **described}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST:
        raise ArgumentError(f"a header of {len(text)} bytes is too long: safetensors reads at most {_LONGEST}")
    before = 8 + len(text)
    return NewFile(
        len(text).to_bytes(8, "little") + text, {x: t._replace(offset=before + t.offset) for x, t in placed.items()}
    )
