"""Element types: their names, their arithmetic, and the types as which MPI sends them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from pdgemm.errors import DTypeError
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.emulation import EMULATIONS


def names(dtypes: tuple[np.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def eps(dtype: Any) -> float:
    """Return the distance from 1 to the next number, 0 for integers."""
    dtype = np.dtype(dtype)
    return 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def largest_power(dtype: Any) -> int:
    """Return the largest e for which 2^e is a number of a real or complex type."""
    return int(ml_dtypes.finfo(np.dtype(dtype)).maxexp) - 1  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class ElementType:
    """How products, BLAS, MPI, HDF5 and GPUs treat elements of one type.

    name    : the name in NumPy or ml_dtypes.
    operand : whether A and B can have this type.   result : whether C can have this type.
    sums    : the accumulation type of its products; "" stands for the type itself.
    blas    : the letter of its BLAS routines; operands of other types are converted to `sums`, or to float32.
    wire    : the type of equal size as which MPI sends the elements; "" stands for the type itself.
    rounds  : whether operands can be rounded to it (compute_type).
    hdf5    : whether HDF5 supports it.
    c_name  : its name in GPU kernels; "" if the kernels do not support it.
    cuda    : its cudaDataType.   cublas : the cublasComputeType_t for accumulation in this type.
    """

    name: str
    operand: bool = False
    result: bool = False
    sums: str = ""
    blas: str = ""
    wire: str = ""
    rounds: bool = False
    hdf5: bool = True
    c_name: str = ""
    cuda: int | None = None
    cublas: int | None = None

    @cached_property
    def dtype(self) -> np.dtype:
        return np.dtype(self.name)

    @cached_property
    def sums_dtype(self) -> np.dtype:
        """The accumulation type of its products."""
        return np.dtype(self.sums or self.name)


_BOTH: Any = {"operand": True, "result": True}
_HALF: Any = _BOTH | {"sums": "float32", "wire": "uint16", "rounds": True}
_WORD: Any = _BOTH | {"sums": "int32"}  # modulo 2^32
_EIGHTH: Any = {"operand": True, "sums": "float32", "wire": "uint8", "hdf5": False}
TYPES = (
    ElementType("bool"),
    ElementType("int8", operand=True, sums="int32", c_name="signed char", cuda=3),
    ElementType("int16", **_WORD),
    ElementType("int32", **_BOTH, c_name="int", cuda=10, cublas=72),
    ElementType("int64", **_BOTH, c_name="long long"),
    ElementType("uint8", **_WORD),
    ElementType("uint16", **_WORD),
    ElementType("uint32", **_WORD),
    ElementType("uint64", **_BOTH, sums="int64"),
    ElementType("float8_e8m0fnu", sums="float32", wire="uint8", hdf5=False),  # powers of two: scales
    ElementType("float8_e4m3fn", **_EIGHTH),
    ElementType("float8_e5m2", **_EIGHTH),
    ElementType("float16", **_HALF, c_name="float16", cuda=2),
    ElementType("bfloat16", **_HALF, c_name="bfloat16", cuda=14, hdf5=False),
    ElementType("float32", **_BOTH, blas="s", c_name="float", cuda=0, cublas=68),
    ElementType("float64", **_BOTH, blas="d", c_name="double", cuda=1, cublas=70),
    ElementType("complex64", **_BOTH, blas="c", c_name="complex<float>", cuda=4, cublas=68),
    ElementType("complex128", **_BOTH, blas="z", c_name="complex<double>", cuda=5, cublas=70),
)
TYPE = {x.dtype: x for x in TYPES}  # by dtype
_WHOLE = tuple(x.dtype for x in TYPES if x.dtype.kind in "biu")
FLOATS = tuple(x.dtype for x in TYPES if x.dtype not in _WHOLE and x.operand)
OPERANDS = tuple(dtype for dtype in (*FLOATS, *_WHOLE) if TYPE[dtype].operand)
RESULTS = tuple(dtype for dtype in (*FLOATS, *_WHOLE) if TYPE[dtype].result)
STORED = tuple(dtype for dtype in dict.fromkeys((*OPERANDS, *RESULTS)) if TYPE[dtype].hdf5)  # by HDF5
BLAS = tuple(x.dtype for x in TYPES if x.blas)
SUMS = tuple(dict.fromkeys(TYPE[dtype].sums_dtype for dtype in OPERANDS))  # accumulation types
NARROW = tuple(x.dtype for x in TYPES if x.sums and x.dtype not in _WHOLE)  # 16 and 8 bits: float32 arithmetic
HALF_NAMES = tuple(x.name for x in TYPES if x.rounds)
_WIRES = {x.dtype: np.dtype(x.wire) for x in TYPES if x.wire}
# the values of compute_type, each with an error bound relative to |A||B|: types to which operands are rounded (2^-9 for
# tf32, because tensor cores may truncate), and emulations, whose bound is `Emulation.error`
COMPUTE = {"float32": eps("float32"), "tf32": 2.0**-9, **{name: eps(name) for name in HALF_NAMES}} | {
    name: how.error for name, how in EMULATIONS.items()
}


def element_type(dtype: Any) -> np.dtype:
    """Return the element type of a matrix from anything that NumPy accepts as a dtype.

    Elements are numbers of fixed size in native byte order, which can be sent, saved and shared.  Raises DTypeError.
    """
    try:
        dtype = np.dtype(dtype)
    except (TypeError, ValueError) as bad:
        raise DTypeError(f"{shown(dtype)} is not a type of elements: {' '.join(str(bad).split())}") from None
    if dtype not in TYPE:
        kinds = names(tuple(TYPE))
        raise DTypeError(f"elements are numbers of native byte order, got {dtype!s:.60}; a matrix can be of {kinds}")
    return TYPE[dtype].dtype


def kind_rank(dtype: np.dtype) -> int:
    """Return 0 for integers, 1 for real and 2 for complex numbers."""
    return {"b": 0, "i": 0, "u": 0, "c": 2}.get(dtype.kind, 1)


def common(*dtypes: np.dtype) -> np.dtype:
    """Return the common type: float32 for float16 with bfloat16.  Raises DTypeError if there is none."""
    if len(set(NARROW) & set(dtypes)) > 1:  # neither can represent the other
        return common(*(TYPE[dtype].sums_dtype if dtype in NARROW else dtype for dtype in dtypes))
    try:
        return np.result_type(*dtypes)
    except TypeError:
        raise DTypeError(f"{names(tuple(dict.fromkeys(dtypes)))} have no common type") from None


def arithmetic(*dtypes: np.dtype) -> np.dtype:
    """Return the type in which elements of these types are multiplied and added.

    It is float32 for floats of 8 and 16 bits; integers, signed or not, are computed modulo 2^32, or modulo 2^64 if one
    of the types has 64 bits.
    """
    if all(dtype in _WHOLE for dtype in dtypes):
        return np.dtype(np.int64) if any(dtype.itemsize == 8 for dtype in dtypes) else np.dtype(np.int32)
    return common(*(TYPE[dtype].sums_dtype if dtype in NARROW else dtype for dtype in dtypes))


def product(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the type of C where a product is called without C: int32 for int8, else the common type."""
    both = common(a, b)
    return both if both in RESULTS or both not in TYPE else TYPE[both].sums_dtype


def multiplies_on_device(dtype: np.dtype, result: bool) -> bool:
    """Return whether devices multiply matrices of this type, or have it as the type of a result.

    Of integers these are int8, with results of int32.
    """
    return bool(TYPE[dtype].c_name) and (dtype not in _WHOLE or dtype.name == ("int32" if result else "int8"))


def can_convert(source: np.dtype, target: np.dtype) -> bool:
    """Return whether elements may be converted to this type; it may have fewer bits.

    Complex numbers are not converted to real numbers, nor real numbers to integers.
    """
    return kind_rank(source) <= kind_rank(target)


def wire(x: np.ndarray) -> np.ndarray:
    """Return a contiguous array in the type that MPI sends: floats of 8 and 16 bits as integers of the same bits."""
    known = _WIRES.get(x.dtype)
    return x if known is None else x.view(known)
