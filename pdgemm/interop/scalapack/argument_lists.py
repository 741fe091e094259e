"""Argument lists of routines, each declared once, and calls whose arguments all processes check together.

The parameters of a Python function declare the arguments of a Fortran routine in their order, each by its kind:

    def _potrs(uplo: Uplo, n: Extent, nrhs: Extent, A: Annotated[DistMatrix, Submatrix("n", "n")],
               B: Annotated[DistMatrix, Submatrix("n", "nrhs", updated=True)]) -> int:

A submatrix A stands for the four arguments a, ia, ja and desca.  `family` makes the routines for the element types,
which take the Fortran arguments; their signatures, the numbers in INFO and the checks follow from the kinds.  The
function gets checked arguments: letters in upper case, extents as int, and submatrices as matrices in the caller's
memory; and the name of the routine, if it has a parameter `routine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np

from pdgemm.errors import ArgumentError, GridError, PdgemmError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.interop.scalapack.blacs import meeting
from pdgemm.interop.scalapack.descriptors import CTXT_, IllegalArgument, illegal, whole_number
from pdgemm.interop.scalapack.submatrices import Desc, SubmatrixArguments
from pdgemm.local.arrays.dtypes import names
from pdgemm.matrix.argument_checks import as_scalar, check_result
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import agree

# the element types by the second letter of a name; integers have both of ScaLAPACK's sizes
_TYPES = {x: tuple(map(np.dtype, types)) for x, types in zip("ISDCZ", (("i4", "i8"), "f", "d", "F", "D"))}
Result = TypeVar("Result")


class Kind:
    """The kind of an argument, and the type in which it is passed.  This base is for arguments without a check."""

    passed: ClassVar[Any] = int

    def fortran(self, name: str) -> dict[str, Any]:
        """Return names and types of the Fortran arguments; the type None marks a result, which only has a number."""
        return {name: self.passed}

    def check(self, call: RoutineCall, name: str) -> Any:
        """Return the value for the function, or raise IllegalArgument."""
        return call.passed[name]


class RoutineCall:
    """One call of a routine.

    numbers  : the number of each Fortran argument.   passed : the Fortran arguments.
    values   : the checked arguments of the function.   submatrices : the submatrices that the call uses.
    """

    def __init__(self, routine: str, kinds: dict[str, Kind], numbers: dict[str, int], passed: dict[str, Any]) -> None:
        self.routine, self.kinds, self.numbers, self.passed = routine, kinds, numbers, passed
        self.dtypes = _TYPES[routine[1]]
        self.values: dict[str, Any] = {}
        self.submatrices: dict[str, SubmatrixArguments] = {}
        for name, kind in kinds.items():
            if isinstance(kind, Submatrix) and (not kind.wanted or first_letter(passed[kind.wanted]) == "V"):
                a, (array, i, j, desc) = name.lower(), (passed[x] for x in kind.fortran(name))
                self.submatrices[name] = SubmatrixArguments(a, numbers[a], array, i, j, desc)

    def check(self, *argument_names: str) -> None:
        """Check these arguments in this order, and store their values."""
        for name in argument_names:
            self.values[name] = self.kinds[name].check(self, name)

    def check_contexts(self, common: ProcessGrid | None) -> None:
        """Raise IllegalArgument for the first submatrix on other processes than those of `common`."""
        for sub in self.submatrices.values():
            if common and sub.matrix.grid.rank_map_in(common) is None:
                text = f"CTXT_ of desc{sub.name} is a context of other processes than the other contexts"
                raise self.illegal(f"desc{sub.name}", text, CTXT_ + 1)

    def check_updated(self) -> None:
        """Raise IllegalArgument where an updated submatrix is read-only, or overlaps a submatrix before it."""
        before: dict[str, DistMatrix] = {}
        for name, sub in self.submatrices.items():
            try:
                if getattr(self.kinds[name], "updated", False):
                    check_result(sub.name, sub.matrix, before)
            except ArgumentError as bad:
                raise self.illegal(sub.name, str(bad)) from None
            before[sub.name] = sub.matrix

    def illegal(self, name: str, text: str, entry: int = 0) -> IllegalArgument:
        """Return the exception for a Fortran argument.   entry : as in `descriptors.illegal`."""
        return illegal(self.routine, self.numbers[name], entry, text)

    def extent(self, name: str) -> int:
        """Return m, n, k or nrhs, or an extent that follows from these."""
        x = self.values
        if name == "min(m, n)":
            return min(x["m"], x["n"])
        if name.startswith("the order of"):  # a matrix to the left or to the right of an m x n one
            return x["m"] if x["side"] == "L" else x["n"]
        return x[name]

    def within(self, name: str, least: int, most: int) -> int:
        """Return an integer argument.  Raises IllegalArgument where it is not within its bounds."""
        whole = whole_number(self.passed[name])
        if whole is None or not least <= whole <= most:
            text = f"{name} must be an integer within {least} to {most}, got {self.passed[name]!r}"
            raise self.illegal(name, text)
        return whole

    @property
    def text(self) -> str:
        """The checked letters, numbers and bounds as a text, which the processes compare."""
        compared = {name: x for name, x in self.values.items() if isinstance(x, (str, int, float, complex, tuple))}
        return "".join(f", {x}" if isinstance(x, str) else f", {name}={x}" for name, x in compared.items())


@dataclass(frozen=True)
class Letter(Kind):
    """An option; only its first character counts.   if_complex : the letters of complex types, if these differ."""

    passed = str
    letters: str
    if_complex: str = ""

    def check(self, call: RoutineCall, name: str) -> str:
        value, letters = call.passed[name], (call.dtypes[0].kind == "c" and self.if_complex) or self.letters
        if not isinstance(value, str) or first_letter(value) not in tuple(letters):
            *most, last = (f'"{x}"' for x in letters)
            raise call.illegal(name, f"{name} must be {', '.join(most)} or {last}, got {value!r}")
        return first_letter(value)


@dataclass(frozen=True)
class Size(Kind):
    """An extent, at least 0.   most : the name of another extent; this extent is not larger."""

    most: str = ""

    def check(self, call: RoutineCall, name: str) -> int:
        size = whole_number(call.passed[name])
        if size is None:
            raise call.illegal(name, f"{name} must be an integer, got {call.passed[name]!r}")
        if size < 0:
            raise call.illegal(name, f"{name} is {size}, must be >= 0")
        if self.most and size > (most := call.extent(self.most)):
            raise call.illegal(name, f"{name} is {size}, must be <= {self.most}, which is {most}")
        return size


@dataclass(frozen=True)
class Scalar(Kind):
    """A number, alpha or beta.   real : it is real even where the matrices are complex."""

    passed = complex
    real: bool = False

    def check(self, call: RoutineCall, name: str) -> Any:
        value, dtype = call.passed[name], call.dtypes[0]
        if isinstance(value, np.ndarray) and value.size == 1:  # a scalar by reference, as in Fortran
            value = value.item()
        try:
            return as_scalar(value, real_type(dtype) if self.real else dtype, "it")
        except (PdgemmError, OverflowError) as bad:
            raise call.illegal(name, str(bad)) from None


@dataclass(frozen=True)
class Submatrix(Kind):
    """The arguments a, ia, ja and desca of sub(A).

    rows, cols : the names of the extents of sub(A) or, if `op` is given, of op(sub(A)).
    op         : the name of the letter, "N", "T" or "C", that says what op is.
    wanted     : the name of a letter.  If the letter is not "V", the arguments are ignored, and the function gets None.
    updated    : the routine writes to sub(A).
    """

    rows: str
    cols: str
    op: str = ""
    wanted: str = ""
    updated: bool = False

    def fortran(self, name: str) -> dict[str, Any]:
        a = name.lower()
        return {a: np.ndarray, f"i{a}": int, f"j{a}": int, f"desc{a}": Desc}

    def check(self, call: RoutineCall, name: str) -> DistMatrix | None:
        if (sub := call.submatrices.get(name)) is None:
            return None
        extents = call.extent(self.rows), call.extent(self.cols)
        sub.rows, sub.cols = extents if call.values.get(self.op, "N") == "N" else extents[::-1]
        sub.check(call.routine, call.dtypes)
        return sub.matrix


Trans = Annotated[Literal["N", "T", "C"], Letter("NTC")]
Uplo = Annotated[Literal["U", "L"], Letter("UL")]
Side = Annotated[Literal["L", "R"], Letter("LR")]
Extent = Annotated[int, Size()]


def check_call(call: RoutineCall, compared: bool = True) -> None:
    """Check all arguments, or raise IllegalArgument for the first illegal one, on all processes.

    compared : letters, extents and scalars must be equal on all processes; False if the function compares them itself.
    """
    common, error = meeting(sub.grid for sub in call.submatrices.values()), None
    try:
        call.check(*call.kinds)
        call.check_contexts(common)
        call.check_updated()
    except Exception as bad:
        error = bad
    if common is None:  # no communicator to agree over
        raise error or GridError(f"{call.routine}: no argument has a valid context")
    first = next(iter(call.submatrices.values()))
    if error is not None or compared or first.matrix.grid.comm is not common.comm:
        # a process that skips this `agree` joins the same allreduce when the function compares its arguments
        agree(common.comm, error, call.routine + (call.text if compared else ""))


def family(
    routine: str, types: str, function: Callable[..., Result], check: Callable[[RoutineCall], None] = check_call
) -> tuple[Callable[..., Result], ...]:
    """Return the routines that a function declares, one for each element type.

    routine : the name, with a "?".   types : the replacements of the "?"; each begins with the element type's letter.
    check   : function that checks a call on all processes together.
    """
    declared = signature(function, eval_str=True)
    kinds, fortran = dict[str, Kind](), dict[str, Any]()
    for name, parameter in declared.parameters.items():
        if name != "routine":
            kinds[name] = parameter.annotation.__metadata__[0]
            fortran |= kinds[name].fortran(name)
    numbers = {name: number for number, name in enumerate(fortran, 1)}
    parameters = [Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, annotation=type) for x, type in fortran.items() if type]
    passed = declared.replace(parameters=parameters)

    def of_type(name: str) -> Callable[..., Result]:
        def called(*arguments: Any, **by_name: Any) -> Result:
            call = RoutineCall(name.upper(), kinds, numbers, passed.bind(*arguments, **by_name).arguments)
            check(call)
            values = {"routine": call.routine} | call.values
            return function(**{x: values.get(x) for x in declared.parameters})

        called.__name__ = called.__qualname__ = name
        called.__module__, called.__signature__ = "pdgemm.scalapack", passed  # type: ignore[attr-defined]
        called.__doc__ = f"{name.upper()}, {names(_TYPES[name[1].upper()])}: {function.__doc__}"
        return called

    return tuple(of_type(routine.replace("?", x)) for x in types.split())


def real_type(dtype: np.dtype) -> np.dtype:
    """Return the type of the real part of a number."""
    return np.zeros(0, dtype).real.dtype


def first_letter(value: object) -> str:
    """Return the first character of an option, in upper case."""
    return str(value)[:1].upper()
