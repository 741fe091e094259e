"""Matrices and tensors in HDF5 files: one standard dataset, read and written by all ranks in parallel.

There are four methods; the report names the method that was used:

    "mpio"         h5py built with MPI: collective hyperslabs; contiguous, chunked, compressed.
    "mpi-io"       any h5py; contiguous datasets whose elements are stored as in memory: MPI-IO at the offset of
                   the dataset in its file.
    "independent"  any h5py; all other datasets, for reading only: each rank reads through h5py independently.
    "one writer"   any h5py; chunked datasets, for writing only: rank 0 writes the elements that all ranks send.

A dataset of one dimension is a matrix of one column.  With each method a rank reads or writes whole rows, or a part of
one row; a redistribution moves the elements between these rows and the layout of the matrix, one piece of the dataset
at a time (`pdgemm.io.pieces`).  A dataset of more dimensions is a tensor, and pieces are boxes (`pdgemm.io.boxes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import pdgemm
from pdgemm.algorithms.protection.checksum import checksums
from pdgemm.errors import ArgumentError, DTypeError, FileError, GridError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.instrument.run_report import RunReport
from pdgemm.instrument.spans import taking, timed
from pdgemm.io import boxes, generations, tensor_source
from pdgemm.io.atomic import on_root, replacing
from pdgemm.io.generations import Saved
from pdgemm.io.many_datasets import ManyDatasets, check_datasets, checked_layouts, create_datasets, load_datasets
from pdgemm.io.new_dataset import NewDataset
from pdgemm.io.pieces import Progress
from pdgemm.io.stored import CHANGED, check_names, file_and_name
from pdgemm.local.arrays.arguments import as_count
from pdgemm.local.arrays.device import HOST
from pdgemm.local.arrays.dtypes import STORED, names
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.names import DeviceName, DType
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.files import say
from pdgemm.tensors.dist_tensor import DistTensor

_LOOKS = 5  # attempts to load a file that other jobs replace meanwhile


def load(
    path: str | Path,
    name: str | None = None,
    grid: ProcessGrid | None = None,
    block: Block | None = None,
    *,
    rows: Any = None,
    cols: Any = None,
    part: Any = None,
    source: tuple[int, int] = (0, 0),
    layout: Any = None,
    dtype: DType | None = None,
    transpose: bool = False,
    verify: bool = False,
    device: DeviceName = HOST,
    progress: Progress | None = None,
) -> Any:
    """Read a dataset as a DistMatrix; of more than two dimensions, as a DistTensor.  Collective over the grid.

        A = hdf5.load("a.h5", "x", grid)            # on a grid of all ranks: hdf5.load("a.h5:/x")
        T = hdf5.load("v.h5:/t2", part=(slice(8), slice(8), slice(None), slice(None)))

    path, name : the file and the dataset.  A dataset of one dimension is read as one column.  Without a name, the path
                has both: `FILE:/DATASET`.
    grid       : by default a grid of all ranks.
    rows, cols : the part of the dataset to read: a slice or a range of step 1, or a pair
                (start, stop); by default all.
    block, source : layout of a matrix, as in `DistMatrix.empty`.
    part       : the part of a tensor to read: a tuple of such a range for each axis.
    layout     : the layout of a tensor: a TensorLayout, or the axes of rows and of columns, as in `DistTensor.empty`;
                by default that of `DistTensor.empty`.  With part or layout, any dataset is read as a DistTensor.
    dtype     : the type to convert to while reading; needed for integers other than int8 and int32.
    transpose : return the transpose of the dataset, or of the part, at no cost: the local arrays are in Fortran order.
                A tensor has its axes in reversed order.
    verify    : compare with the checksum that `save` recorded; only for the whole dataset, not for a part.
    device    : the device of the matrix, as in `DistMatrix.empty`; the dataset is copied through the host in pieces.
    progress  : called as progress(done, total) after each transfer.

    For a part of the columns, each row is read separately; if two rows are less than 4 KiB apart, many rows are read at
    once, with the bytes in between.  A chunked dataset is read in whole chunks.

    Links are followed.  The bytes of a dataset may be in other files: in the file that a link leads to, or in the files
    of a virtual dataset.  All these files must exist.  A file that changes while it is read raises FileError.

    `.report` has the method, bytes and seconds.  Extra memory: at most 64 MiB per rank, or two chunks of the dataset.
    Raises FileError, LayoutError, DTypeError, ArgumentError or DeviceError on every rank.
    """
    how: Any = {"source": source, "dtype": dtype, "transpose": transpose, "device": device}
    how |= {"verify": verify, "progress": progress}
    named = lambda: file_and_name(path, name)  # noqa: E731
    return tensor_source.load("hdf5.load", named, grid, block, rows, cols, part, layout, **how)


def dataset(
    path: str | Path, name: str | None = None, grid: ProcessGrid | None = None, *, dtype: DType | None = None
) -> pdgemm.StoredMatrix:
    """Return a dataset as a matrix that stays in its file, an operand of `pdgemm`.  Collective over the grid.

        A = hdf5.dataset("a.h5", "x", grid)         # reads only the shape and the type
        C = pdgemm(1.0, A, B)                       # reads each panel of A while the previous one is multiplied

    path, name, grid : as in `load`.
    dtype : the type to convert to while reading; needed for integers other than int8 and int32.

    Raises FileError, LayoutError or DTypeError on every rank.
    """
    return pdgemm.StoredMatrix(*tensor_source.inspected("hdf5.dataset", lambda: file_and_name(path, name), grid, dtype))


def save(
    path: str | Path,
    name: str,
    matrix: DistMatrix | DistTensor | np.ndarray,
    *,
    chunks: tuple[int, ...] | bool | None = None,
    compression: str | None = None,
    ndim: int = 2,
    check: bool = True,
    overwrite: bool = False,
    replaces: RunReport | None = None,
    grid: ProcessGrid | None = None,
    progress: Progress | None = None,
) -> RunReport:
    """Write a matrix, a tensor or a vector as one dataset.  Collective over its grid.

    path, name : the dataset is created, or replaces one that pdgemm wrote; all other contents of the file are kept.
            If the name is a link, the new dataset replaces the link; the target of a soft link keeps its name, and a
            dataset with hard links keeps its other names.  A name that leads through an external link raises FileError.
    overwrite : also replace a dataset of another program; without it, that is an ArgumentError.
    chunks, compression : as in h5py ("gzip").  Where h5py is not built with MPI, rank 0 writes such a dataset: each
            other rank sends its elements to rank 0, at most 2^19 elements at a time, or one chunk.
    ndim  : with 1, a matrix of one column becomes a dataset of one dimension.
    check : read the file back and compare its checksum before the file is renamed, because an MPI library may not
            report a failed write.
    matrix, grid : a DistMatrix, a DistTensor of at least one dimension, or a 1-D array that all ranks of the grid
            have; by default all ranks.
    replaces : if the matrix was computed from the old dataset, the report of its load.  FileError is raised if another
            job has replaced the dataset since that load, so that the work of that job is not lost.

    The file is complete under its name or does not exist: `save` writes a temporary file beside it, and renames
    the temporary file at the end.  Attributes of the dataset record layout, dtype and a checksum.
    Raises FileError, LayoutError, DTypeError or ArgumentError on every rank, and leaves the old file unchanged.
    """
    start, (A, ndim) = perf_counter(), boxes.as_saved(matrix, ndim, grid)
    X: DistMatrix = boxes.unfolded(A)
    with together(communicator(matrix=X)) as description:
        path = Path(path)
        check_names(path, name)
        description += ["hdf5.save", path, name, chunks, compression, check, replaces and replaces.checksum]
        description += [f"ndim={ndim}", bool(overwrite)]
        _check_saved(A.dtype)
        boxes.check_dimensions(f"{path}:{name}", A, ndim)
    written = boxes.checksum_of(A)
    dataset = NewDataset(path, name, X.grid, X.distribution, X.dtype, written, ndim, A.shape)
    storage = {"chunks": chunks[:ndim] if isinstance(chunks, tuple) else chunks, "compression": compression}
    with timed("write", X.stored.nbytes), taking(None), dataset.replacing(replaces, overwrite, storage):
        if A.size:
            with dataset.opened(write=True) as transfer:
                boxes.write(A, transfer, dataset.unit, progress)
        dataset.complete(written, check)
    return dataset.report(perf_counter() - start)


def save_all(
    path: str | Path,
    matrices: Mapping[str, DistMatrix],
    *,
    attrs: Mapping[str, Any] | None = None,
    keep: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Write the state of a program, matrices and attributes, to one file.  Collective over the ranks of the matrices.

        hdf5.save_all("state.h5", {"w": W, "m": M}, attrs={"step": 7}, keep=2)

    matrices : matrices by the names of their datasets; all on grids of the same ranks.
    attrs    : attributes of the file: numbers, strings, and arrays of numbers, of at most 58 KiB each.
    keep     : number of generations that are kept: the file, and older ones as `state.h5.1`, `state.h5.2`.
    progress : called as progress(done, total) after each matrix.

    The new file is complete under its name, checked and on the disk, or the old file is unchanged: `save_all` writes a
    temporary file beside it, and renames the temporary file.  The disk needs as much space as the matrices have bytes.
    Matrices of at most 2^19 elements are gathered, many in one exchange, and each of them is written by one rank.
    Other contents of the old file are lost.  A file that `save_all` did not write is replaced only with `overwrite`.

    The file records a checksum of each matrix, the generation, and the job that wrote it.  FileError is raised if
    another job has saved to the file since this job saved or loaded it.  Saves of the job whose generation was loaded
    do not count.  So the ranks of a killed job, which may still run, cannot replace the file of a later job.

    Returns the report.  Raises ArgumentError, DTypeError, GridError or FileError on every rank.
    """
    start, saved = perf_counter(), dict(attrs or {})
    matrices = dict(matrices)
    if not matrices:
        raise ArgumentError("matrices is empty: pass at least one matrix to save")
    comm = communicator(**{str(name): x for name, x in matrices.items()})
    with together(comm) as description:
        path = Path(path)
        for name, x in matrices.items():
            _check_state(path, name, x, comm)
        saved = generations.check_attrs(saved)
        if len({*map(generations.plain_name, matrices)}) < len(matrices):
            raise ArgumentError(f"matrices: some of the names {', '.join(matrices)} name the same dataset")
        keep = as_count(keep, "keep", 1)
        description += ["hdf5.save_all", path, *matrices, *(x.shape for x in matrices.values()), keep, bool(overwrite)]
        description += [(key, np.asarray(value).dtype.str, np.asarray(value).tobytes()) for key, value in saved.items()]
    generations.same_job(comm)
    sums = checksums(comm, [*matrices.values()])
    total, notify = sum(x.size * x.dtype.itemsize for x in matrices.values()), GuardedCallback(progress)
    known = [
        generations.Matrix(generations.plain_name(name), x.shape, x.dtype.str, recorded)
        for (name, x), recorded in zip(matrices.items(), sums)
    ]
    with replacing(path, comm, total, last=lambda: generations.keep(path, keep)) as partial:

        def create() -> tuple[generations.Token, list[int]]:
            token = generations.next_token(path, overwrite)
            generations.create(partial, token, saved, known)
            return token, create_datasets(partial, matrices, sums)

        token, offsets = on_root(comm, path, create)
        outputs = ManyDatasets(partial, [*matrices.values()], offsets, comm)
        with timed("write", sum(x.stored.nbytes for x in matrices.values())), taking(None):
            outputs.write(notify)
            outputs.check_elements(path, sums)
        agree(comm, notify.error)
        on_root(comm, path, lambda: check_datasets(partial, path, matrices, offsets))
        on_root(comm, path, lambda: generations.check_held(partial, token, matrices))
    on_root(comm, path, lambda: generations.trim(path, keep))
    generations.remember(path, token)
    saved_as: Any = {"path": str(path), "generation": token.generation, "names": tuple(matrices)}
    return RunReport(generations.text_of_saved, **saved_as, bytes=total, seconds=perf_counter() - start)


def load_all(
    path: str | Path, grid: ProcessGrid | None = None, layouts: Mapping[str, Mapping[str, Any]] | None = None
) -> Saved:
    """Load the matrices and attributes of a file of `save_all`, on any number of ranks.  Collective over the grid.

        state = hdf5.load_all("state.h5", grid, {"w": {"block": 64, "dtype": "float32"}})
        W, step = state.matrices["w"], state.attrs["step"]

    grid    : by default a grid of all ranks.
    layouts : options of `load` by the name of the matrix: block, source, dtype, transpose, device.

    The file is opened once, and each matrix is compared with its checksum.  Where the file is damaged or missing, the
    previous generation is loaded, and a line on standard error says so.  Later calls of `save_all` continue from it.

    Returns `matrices`, `attrs` and `generation`.  Raises FileError, ArgumentError, LayoutError, DTypeError or
    DeviceError on every rank.
    """
    grid = default_grid() if grid is None else grid
    comm = communicator_of(grid)
    with together(comm) as description:
        path = Path(path)
        check_names(path, "")
        wanted = checked_layouts(layouts)
        description += ["hdf5.load_all", path, *wanted, *(options.get("device", HOST) for options in wanted.values())]
    for _ in range(_LOOKS):  # ranks of a killed job may still run, and save
        there, bad = on_root(comm, path, lambda: generations.saved_generations(path))
        for each in there:
            if missing := set(wanted) - set(each.names):
                raise ArgumentError(f"{path} has no {', '.join(sorted(missing))}; it has {', '.join(each.names)}")
            loaded, error = dict[str, DistMatrix](), ""
            try:
                loaded |= load_datasets(each.path, each.names, grid, wanted)
                for name in (x for x in each.names if x not in loaded):  # another program has compressed it
                    loaded[name] = load(each.path, name, grid, verify=True, **wanted.get(name, {}))
            except FileError as failure:
                error = str(failure)
            if not on_root(comm, path, lambda: generations.is_there(each)):  # noqa: B023
                break
            if error:
                bad.append(error)
                if comm.rank == 0 and "is damaged" in error:
                    generations.reject(each.path)
                continue
            if comm.rank == 0 and bad:
                say(f"{'; '.join(bad)}: generation {each.token.generation} of {each.path} was loaded in its place")
            generations.same_job(comm)
            generations.remember(path, each.token)
            return Saved({name: loaded[name] for name in each.names}, each.attrs, each.token.generation)
        else:
            raise FileError("; ".join(bad))
    raise FileError(f"{path} {CHANGED}")


def _check_state(path: Path, name: str, x: DistMatrix, comm: MPI.Intracomm) -> None:
    """Raise an error where a matrix cannot be saved with the others.  Local."""
    check_matrices(**{str(name): x})
    if not isinstance(name, str) or not name.strip("/."):
        raise ArgumentError(f"matrices: {name!r} is not the name of a dataset")
    check_names(path, name)
    if MPI.Comm.Compare(x.grid.comm, comm) not in (MPI.IDENT, MPI.CONGRUENT):
        raise GridError(f"{name} is on other ranks than the first matrix: all must be on grids of the same ranks")
    _check_saved(x.dtype)


def _check_saved(dtype: np.dtype) -> None:
    if dtype not in STORED or not dtype.isnative:
        raise DTypeError(f"a matrix of {dtype} cannot be saved; use astype, to one of {names(STORED)}")
