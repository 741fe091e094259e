"""The names that users pass, as types, so that a type checker finds a misspelt name.

`AnyName(text)` is a name that is checked only at run time: a name that was registered from outside the package (and
returned by `register_algorithm` or `register_mover`), or a name from a file.  An AnyName is an ordinary string.
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import numpy as np

AnyName = NewType("AnyName", str)

AlgorithmName = (
    Literal[
        "auto", "summa", "stationary_a", "stationary_b", "cannon", "2.5d", "inner",
        "row", "column", "allgather", "reduce_scatter",
    ]
    | AnyName
)  # fmt: skip
MoverName = Literal["auto", "mpi", "shared", "ibcast", "ring", "staged", "ipc", "nccl"] | AnyName
DeviceName = Literal["host", "cuda"] | AnyName
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ComputeType = (
    Literal[
        "float32", "tf32", "float16", "bfloat16", "bf16x9", "ozaki", "ozaki-4", "ozaki-5", "ozaki-6", "ozaki-7",
        "ozaki-8", "ozaki-9", "ozaki-10", "ozaki-11", "ozaki-12",
    ] | AnyName
)  # fmt: skip
RandomKind = Literal["uniform", "normal"]
QRMode = Literal["reduced", "economic", "r"]
Norm = Literal["fro", "max", "nuc"] | float  # a matrix norm
QRMethod = Literal["auto", "cholesky", "householder", "tsqr"]
LstsqDriver = Literal["gelsd", "gelsy"]
Refinement = Literal["auto", "gmres"]  # of `solve` by factors in single precision
Protection = Literal["detect", "repair"]
Transpose = Literal["N", "T", "C", "n", "t", "c"]  # op(A): A, its transpose, its conjugate transpose

ElementTypeName = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
ElementTypeCode = Literal[  # NumPy's other names of these types
    "?", "b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16",
    "e", "f", "d", "F", "D", "int", "float", "complex", "half", "single", "double",
]  # fmt: skip
DType = ElementTypeName | ElementTypeCode | AnyName | np.dtype[Any] | type[Any]
