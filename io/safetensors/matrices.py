"""DistMatrix objects in safetensors files, which all ranks read and write in parallel, by MPI-IO after the header."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pdgemm.algorithms.protection.checksum import checksums
from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.instrument.spans import taking, timed
from pdgemm.io.atomic import on_root, replacing
from pdgemm.io.many_datasets import ManyDatasets, checked_layouts, read_datasets
from pdgemm.io.safetensors.header import (
    CODE,
    DTYPE,
    WRITTEN_BY,
    NewFile,
    Tensor,
    check_state,
    new_file,
    read_header,
    safetensors_library,
)
from pdgemm.local.arrays.dtypes import TYPE
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.support.agreement import together


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
