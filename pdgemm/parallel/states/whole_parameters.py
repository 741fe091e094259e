"""Parameters of a model, whole and by name, to and from safetensors files of other programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, FileError
from pdgemm.instrument.spans import taking, timed
from pdgemm.io import dataset_access
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import Transfer
from pdgemm.io.safetensors.header import CODE, DTYPE, Header, Tensor, check_state, new_file, read_header
from pdgemm.io.safetensors.matrices import being_written
from pdgemm.io.safetensors.windows import Place, has_range, place_of_window, read_range, transfer_to, write_range
from pdgemm.local.arrays.dtypes import FLOATS, element_type
from pdgemm.local.arrays.dtypes import names as names_of
from pdgemm.parallel.buckets import Buckets
from pdgemm.parallel.states.training_state import model_of
from pdgemm.schedules.training.parameter_division import Division
from pdgemm.support.agreement import together
from pdgemm.support.files import LOST

_SHOWN = 20  # names of a message
_REAL = tuple(x for x in FLOATS if x.kind != "c")
Names = Mapping[str, str] | Callable[[str], str] | None
Transposed = Collection[str] | Callable[[str], bool]


class Unmatched(NamedTuple):
    """Names without a partner.   missing : parameters that the file does not have.   extra : tensors of the file."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]


def export_parameters(
    path: str | Path,
    buckets: Buckets,
    *,
    dtype: Any = None,
    names: Names = None,
    transposed: Transposed = (),
    metadata: Mapping[str, str] | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> int:
    """Write the whole parameters of a model to a safetensors file, by name.  Collective over the mesh.

        export_parameters("model.safetensors", buckets, dtype="bfloat16")

    path     : the file, which replaces one that pdgemm wrote, and with overwrite any other one.  Any number of ranks,
        with any mesh and stage, writes the same bytes.
    dtype    : of the tensors: float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; by default that of the
        parameters.  Where it is another one, values are rounded from the master weights.
    names    : names in the file by those of parameters, in a mapping or as a function; others stay as they are.
    transposed : names of the matrices of which the file has the transposed ones, or a function of the name that is
        true for them: layers of PyTorch keep (outputs, inputs).
    metadata : strings by name, by default {"format": "pt"}, which other libraries want; "written by" is added.
    check    : each rank reads back what it has written, before the file is renamed.

    No elements are sent: each rank writes those that it updates, with stage 0 as many, and a parameter that several
    ranks have, or two stages that are tied, is written once.  Extra memory: at most 16 MiB a rank.
    Rows of a matrix that is divided by columns, or transposed, are written one at a time, which takes longer.
    The file is complete under its name, or the old file is left as it was; a job that is killed leaves a file
    `.NAME.*.partial`, which the next one removes.

    Returns the bytes of the file.  Raises ArgumentError, DTypeError or FileError on every rank.
    """
    mesh, layout = buckets.mesh, buckets.layouts.whole
    with together(mesh.comm) as arguments:
        path, kind = Path(path), layout.dtype if dtype is None else element_type(dtype)
        if kind not in _REAL:
            raise DTypeError(f"parameters are exported as real numbers of {names_of(_REAL)}, got dtype={kind}")
        arguments += ["export_parameters", path, kind, bool(check), bool(overwrite)]
    model = model_of(mesh, buckets.divisions)
    with together(mesh.comm) as arguments:
        there, turned = _in_file(model, names, transposed)
        twice = {x: [name for name in there if there[name] == x] for x in there.values()}
        if alike := [f"{' and '.join(x)} as {name!r}" for name, x in twice.items() if len(x) > 1]:
            raise ArgumentError(f"parameters of a file have names of their own, got {'; '.join(alike)}")
        shapes = {name: division.shape[:: -1 if turned[name] else 1] for name, (division, _) in model.items()}
        new = new_file({there[name]: Tensor(CODE[kind], shape) for name, shape in shapes.items()}, metadata)
        arguments += ["export_parameters", new.text, [*turned.values()]]
        own = [name for name, (division, stages) in model.items() if _writes(buckets, name, division, stages)]
        parts = [_OwnPart(buckets, name, new.tensors[there[name]], turned[name], kind) for name in own]
    with being_written(path, mesh.comm, new, overwrite) as partial, timed("write", sum(x.nbytes for x in parts)):
        with dataset_access.all_by_mpi_io(partial, mesh.comm, write=True) as transfer_of, together(mesh.comm):
            for part in parts:
                write_range(part.transfer(transfer_of), part.place, part.start, part.values)
        if check:
            with dataset_access.all_by_mpi_io(partial, mesh.comm) as transfer_of, together(mesh.comm):
                for x in parts:
                    if not has_range(x.transfer(transfer_of), x.place, x.start, x.values, kind):
                        raise FileError(f"{path}: {LOST}")
    return new.size


def import_parameters(
    path: str | Path,
    buckets: Buckets,
    *,
    names: Names = None,
    transposed: Transposed = (),
    strict: bool = True,
    convert: bool = False,
) -> Unmatched:
    """Set the parameters of a model, and their master weights, from a safetensors file.  Collective over the mesh.

        import_parameters("model.safetensors", buckets, names=lambda name: f"model.{name}.weight")

    names, transposed : as of `export_parameters`.   The state of an optimizer stays: import before the first step.
    strict  : the file has all parameters and no others.  False: what only one of them has stays as it is.
    convert : also take integers, and numbers that are rounded.  By default the master weights, float64 or float32, hold
        what the file has: float16, bfloat16 and 8-bit floats, for example, in float32.

    No elements are sent: each rank reads its windows, with stage 3 what it keeps.  Extra memory: the rank's part of one
    parameter, in the type of the file, and 4 MiB.
    Returns the names that are in one of them alone.  Raises FileError on every rank, before anything is set, where the
    file is damaged, or has other parameters, which it names with their shapes and types here and there; ArgumentError
    where an argument is wrong.  Where a disk fails later, some parameters are those of the file.
    """
    mesh = buckets.mesh
    with together(mesh.comm) as arguments:
        path = Path(path)
        arguments += ["import_parameters", path, bool(strict), bool(convert)]
    model = model_of(mesh, buckets.divisions)
    with together(mesh.comm) as arguments:
        there, turned = _in_file(model, names, transposed)
        arguments += ["import_parameters", *there.items(), [*turned.values()]]
    header = on_root(mesh.comm, path, lambda: read_header(path))
    shapes = {name: division.shape for name, (division, _) in model.items()}
    unmatched = _compared(path, header, shapes, there, turned, buckets.layouts.whole.wide, strict, convert)
    for line in buckets.lines:
        for bucket in line.layout.buckets:
            line.wait_for(bucket)  # what comes in from other ranks, before a rank may fail alone
    own = [name for name in buckets.divisions if there[name] in header.tensors]
    with timed("read", sum(x.storage.arrays["parameters"].nbytes for x in buckets.lines)), taking(None):
        with dataset_access.all_by_mpi_io(path, mesh.comm) as transfer_of, together(mesh.comm):
            for name in own:
                if (home := buckets.line_of(name)) is not None:
                    part = _Stored(buckets, name, header.tensors[there[name]], turned[name], transfer_of)
                    home.set_parameter(name, part)
        on_root(mesh.comm, path, lambda: check_state(path, header))
    return unmatched


class _OwnPart:
    """The part of a parameter that this rank writes: `values`, from element `start` of its window on."""

    def __init__(self, buckets: Buckets, name: str, tensor: Tensor, transposed: bool, kind: np.dtype) -> None:
        line, division = buckets.line_of(name), buckets.divisions[name]
        assert line is not None
        layout, storage, bucket = line.layout, line.storage, line.layout.bucket_of[name]
        own = storage.own_parameters(bucket) if kind == layout.dtype else storage.own_masters(bucket)
        elements, place = layout.overlap(name, layout.part(bucket, line.index))
        first = layout.part(bucket, line.index).start - storage.span(bucket).start
        self.start, self.values = elements.start, own[first + place.start : first + place.stop]
        self.place = place_of_window(division.shape, division.window(buckets.mesh.shape, buckets.mesh.rank), transposed)
        self.nbytes, self._tensor, self._shape = len(self.values) * kind.itemsize, tensor, division.shape

    def transfer(self, transfer_of: Callable[..., Transfer]) -> Transfer:
        """Return the transfer of the tensor."""
        return transfer_to(transfer_of, self._tensor, self._shape, self.place)


class _Stored:
    """This rank's window of a parameter in a file: ranges of its elements are read when they are taken."""

    def __init__(
        self, buckets: Buckets, name: str, tensor: Tensor, transposed: bool, transfer_of: Callable[..., Transfer]
    ) -> None:
        division, mesh = buckets.divisions[name], buckets.mesh
        self._place: Place = place_of_window(division.shape, division.window(mesh.shape, mesh.rank), transposed)
        self._transfer, self._dtype = transfer_to(transfer_of, tensor, division.shape, self._place), tensor.dtype

    def __getitem__(self, span: slice) -> np.ndarray:
        return read_range(self._transfer, self._place, span.start, span.stop, self._dtype)


def _writes(buckets: Buckets, name: str, division: Division, stages: list[int]) -> bool:
    """Does this rank's line write a parameter?  Of lines with the same window, that of the lowest rank does."""
    mesh = buckets.mesh.shape
    if buckets.line_of(name) is None:
        return False
    line = mesh.line(division.line(mesh, buckets.layouts.whole.tree).axis, buckets.mesh.rank)
    return min(line) in division.owners(mesh, stages)


def _in_file(model: Mapping[str, Any], names: Names, transposed: Transposed) -> tuple[dict[str, str], dict[str, bool]]:
    """Return the name of each parameter in the file, and whether it is transposed there.  Raises ArgumentError."""
    if isinstance(transposed, str):
        raise ArgumentError(f"transposed are names, or a function of a name, got {transposed!r}: pass [{transposed!r}]")
    transposed = transposed if callable(transposed) else tuple(transposed)
    for what, some in (("names", names), ("transposed", transposed)):
        unknown = [] if some is None or callable(some) else [x for x in some if x not in model]
        if unknown:
            raise ArgumentError(f"{what} has {unknown[0]!r}, which is no parameter; these are {', '.join(model)}")
    there, turned = dict[str, str](), dict[str, bool]()
    for name, (division, _) in model.items():
        there[name] = names(name) if callable(names) else (names or {}).get(name, name)
        turned[name] = bool(transposed(name) if callable(transposed) else name in transposed)
        if not isinstance(there[name], str):
            raise ArgumentError(f"the name of parameter {name!r} in the file is a string, got {there[name]!r}")
        if turned[name] and len(division.shape) != 2:
            raise ArgumentError(f"parameter {name!r} has the shape {division.shape}: matrices alone are transposed")
    return there, turned


def _compared(
    path: Path,
    header: Header,
    shapes: Mapping[str, tuple[int, ...]],
    there: Mapping[str, str],
    turned: Mapping[str, bool],
    wide: np.dtype,
    strict: bool,
    convert: bool,
) -> Unmatched:
    """Return the names without a partner.  Raises FileError, the same on all ranks, for the file of another model."""
    wrong, used = list[str](), {*there.values()}
    missing = tuple(name for name in shapes if there[name] not in header.tensors)
    extra = tuple(name for name in header.tensors if name not in used)
    for name, shape in shapes.items():
        x, turn = header.tensors.get(there[name]), -1 if turned[name] else 1
        called = name if there[name] == name else f"{name} (there {there[name]})"
        here = f"{Tensor('F64' if wide == np.float64 else 'F32', shape[::turn])} here"
        if x is None:
            wrong += [f"{called} is {here}, and not there"] if strict else []
        elif x.shape != shape[::turn]:
            hint = ": see transposed=" if len(shape) == 2 and x.shape == shape[::-turn] else ""
            wrong.append(f"{called} is {x} there, and {here}{hint}")
        elif x.code not in DTYPE or x.dtype.kind == "c":
            wrong.append(f"{called} is {x} there, which is not read, and {here}")
        elif not convert and not (x.dtype in _REAL and np.can_cast(x.dtype, wide)):
            wrong.append(f"{called} is {x} there, and {here}: see convert=")
    wrong += [f"{name} is {header.tensors[name]} there, and not here" for name in extra] if strict else []
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise FileError(f"{path} has parameters of another model: {'; '.join(wrong[:_SHOWN])}{more}")
    return Unmatched(missing, extra)
