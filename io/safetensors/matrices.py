"""DistMatrix objects in safetensors files, which all ranks read and write in parallel, by MPI-IO after the header."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import checksums
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.instrument.spans import taking, timed
from pdgemm.io.atomic import check_header, create_with_header, on_root, replacing
from pdgemm.io.many_datasets import ManyDatasets, checked_layouts, read_datasets
from pdgemm.io.stored import CHANGED
from pdgemm.local.arrays.dtypes import TYPE
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.support.agreement import together
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


def save_all(
    path: str | Path,
    matrices: Mapping[str, DistMatrix],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    metadata: Mapping[str, str] | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> int:
    """Write matrices as the tensors of a safetensors file.  Collective over the ranks of the matrices.

        safetensors.save_all("model.safetensors", {"w": W, "b": b}, shapes={"b": (10,)})

    matrices : matrices by tensor name; all on grids of the same ranks, of any type but complex128.
    shapes   : shapes of tensors by name, where they differ from the matrix; elements are in the same order, by rows.
    metadata : strings by name, by default {"format": "pt"}, which other libraries expect; "written by" is added.
    check    : read the file back and compare its checksums before it is renamed.
    overwrite : also replace a file that pdgemm did not write.

    The file is complete under its name or does not exist, as with `npy.save`.  Matrices of at most 2^19 elements are
    written many at a time, each by one rank.  Extra memory: at most 64 MiB per rank.
    Returns the size of the file in bytes.
    Raises ArgumentError, DTypeError, LayoutError, GridError or FileError on every rank.
    """
    matrices = dict(matrices)
    if not matrices:
        raise ArgumentError("matrices is empty: pass at least one matrix to save")
    comm = communicator(**{str(name): x for name, x in matrices.items()})
    with together(comm) as description:
        path, others = Path(path), {name: tuple(x) for name, x in (shapes or {}).items()}
        check_matrices(**{str(name): x for name, x in matrices.items()})
        if unknown := others.keys() - matrices.keys():
            raise ArgumentError(f"shapes has {min(unknown)!r}, which is not one of the matrices {', '.join(matrices)}")
        tensors = {name: _tensor(name, x, others.get(name, x.shape)) for name, x in matrices.items()}
        new = new_file(tensors, metadata)
        description += ["safetensors.save_all", path, new.text, bool(check), bool(overwrite)]
    in_order = [matrices[name] for name in new.tensors]
    sums = checksums(comm, in_order) if check else []
    with being_written(path, comm, new, overwrite) as partial, timed("write", sum(x.stored.nbytes for x in in_order)):
        outputs = ManyDatasets(partial, in_order, [x.offset for x in new.tensors.values()], comm)
        outputs.write(lambda done, total: None)
        if check:
            outputs.check_elements(path, sums)
    return new.size


def load_all(
    path: str | Path,
    grid: ProcessGrid | None = None,
    layouts: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    names: Collection[str] | None = None,
) -> dict[str, DistMatrix]:
    """Read the tensors of a safetensors file as matrices, by their names.  Collective over the grid.

        W = safetensors.load_all("model.safetensors", grid, {"w": {"block": 64, "transpose": True}})["w"]

    grid    : by default a grid of all ranks.
    layouts : options of `npy.load` by the name of the tensor: block, source, dtype, transpose, device.
    names   : the tensors to read; None: all tensors of the file.

    A tensor of one dimension is a column, as in a .npy file; dimensions behind the first one are columns, all together.
    Raises FileError, ArgumentError, LayoutError, DTypeError or DeviceError on every rank.
    """
    grid = default_grid() if grid is None else grid
    comm = communicator_of(grid)
    with together(comm) as description:
        path, options = Path(path), checked_layouts(layouts)
        if isinstance(names, str):
            raise ArgumentError(f"names must be a list of names, got {names!r}: pass [{names!r}]")
        wanted_names = None if names is None else [*names]
        description += ["safetensors.load_all", path, *options, wanted_names]
    header = on_root(comm, path, lambda: read_header(path))
    wanted_names = [*header.tensors] if wanted_names is None else wanted_names
    if missing := [name for name in (*wanted_names, *options) if name not in header.tensors]:
        raise ArgumentError(f"{path} has no {', '.join(map(str, missing))}; it has {', '.join(header.tensors)}")
    tensors = {name: header.tensors[name] for name in wanted_names}
    stored = {name: x._replace(shape=((*x.shape, 1)[0], prod(x.shape[1:]))) for name, x in tensors.items()}

    def check(_: object) -> None:
        on_root(comm, path, lambda: check_state(path, header))

    return read_datasets("safetensors.load_all", path, stored, grid, options, tuple(TYPE), check)


@contextmanager
def being_written(path: Path, comm: MPI.Intracomm, new: NewFile, overwrite: bool) -> Iterator[Path]:
    """Create a file with only its header; yield its temporary name; the block writes the elements.  Collective."""
    on_root(comm, path, lambda: bool(safetensors_library()))  # before anything is written
    with replacing(path, comm, new.size, bool(overwrite), WRITTEN_BY) as partial:
        on_root(comm, path, lambda: new.create(partial))
        with taking(None):
            yield partial
        on_root(comm, path, lambda: new.check(path, partial))


def _tensor(name: str, x: DistMatrix, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of a matrix.  Raises DTypeError or LayoutError."""
    if x.dtype not in CODE:
        kinds = ", ".join(map(str, DTYPE.values()))
        raise DTypeError(f"a safetensors file cannot hold {name}, of {x.dtype}: convert it to one of {kinds}")
    if prod(shape) != x.size or any(n < 0 for n in shape):
        raise LayoutError(f"{name} is {x.shape[0]} x {x.shape[1]}, and cannot have the shape {shape}")
    return Tensor(CODE[x.dtype], tuple(map(int, shape)))
