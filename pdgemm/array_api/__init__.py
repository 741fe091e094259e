"""The Python array API standard, version 2025.12, on distributed arrays.

Functions of each element are NumPy's universal functions, which an Array computes on the elements of each rank.
"""
# ruff: noqa: I001

from numpy import e as e, inf as inf, isdtype as isdtype, nan as nan, newaxis as newaxis, pi as pi
from numpy import (
    abs as abs, acos as acos, acosh as acosh, add as add, all as all, any as any, asin as asin, asinh as asinh,
    atan as atan, atan2 as atan2, atanh as atanh, bitwise_and as bitwise_and, bitwise_invert as bitwise_invert,
    bitwise_left_shift as bitwise_left_shift, bitwise_or as bitwise_or, bitwise_right_shift as bitwise_right_shift,
    bitwise_xor as bitwise_xor, ceil as ceil, conj as conj, copysign as copysign, cos as cos, cosh as cosh,
    divide as divide, equal as equal, exp as exp, expm1 as expm1, floor as floor, floor_divide as floor_divide,
    greater as greater, greater_equal as greater_equal, hypot as hypot, imag as imag, isfinite as isfinite,
    isinf as isinf, isnan as isnan, less as less, less_equal as less_equal, log as log, log10 as log10,
    log1p as log1p, log2 as log2, logaddexp as logaddexp, logical_and as logical_and, logical_not as logical_not,
    logical_or as logical_or, logical_xor as logical_xor, max as max, maximum as maximum, mean as mean, min as min,
    minimum as minimum, multiply as multiply, negative as negative, nextafter as nextafter, not_equal as not_equal,
    permute_dims as permute_dims, positive as positive, pow as pow, prod as prod, real as real,
    reciprocal as reciprocal, remainder as remainder, sign as sign, signbit as signbit, sin as sin, sinh as sinh,
    sqrt as sqrt, square as square, squeeze as squeeze, std as std, subtract as subtract, sum as sum, tan as tan,
    tanh as tanh, trunc as trunc, var as var,
)  # fmt: skip
from pdgemm.array_api.array import Array as Array
from pdgemm.array_api.creation import (
    arange as arange, asarray as asarray, empty as empty, empty_like as empty_like, eye as eye,
    from_dlpack as from_dlpack, full as full, full_like as full_like, linspace as linspace, meshgrid as meshgrid,
    ones as ones, ones_like as ones_like, zeros as zeros, zeros_like as zeros_like,
)  # fmt: skip
from pdgemm.array_api.inspection import (
    astype as astype, bool as bool, can_cast as can_cast, complex64 as complex64, complex128 as complex128,
    finfo as finfo, float32 as float32, float64 as float64, iinfo as iinfo, int8 as int8, int16 as int16,
    int32 as int32, int64 as int64, result_type as result_type, uint8 as uint8, uint16 as uint16, uint32 as uint32,
    uint64 as uint64,
)  # fmt: skip
from pdgemm.array_api.elementwise_functions import clip as clip, where as where
from pdgemm.array_api.inspection import __array_namespace_info__ as __array_namespace_info__
from pdgemm.array_api.manipulation import (
    broadcast_arrays as broadcast_arrays, reshape as reshape,
)  # fmt: skip
from numpy import (
    argmax as argmax, argmin as argmin, broadcast_shapes as broadcast_shapes, broadcast_to as broadcast_to,
    concat as concat, count_nonzero as count_nonzero, cumulative_prod as cumulative_prod,
    cumulative_sum as cumulative_sum, diff as diff, expand_dims as expand_dims, flip as flip, isin as isin,
    moveaxis as moveaxis, nonzero as nonzero, repeat as repeat, roll as roll, round as round,
    searchsorted as searchsorted, stack as stack, take as take, take_along_axis as take_along_axis, tile as tile,
    tril as tril, triu as triu, unique_all as unique_all, unique_counts as unique_counts,
    unique_inverse as unique_inverse, unique_values as unique_values, unstack as unstack,
)  # fmt: skip
from pdgemm.array_api import fft as fft, linalg as linalg
from pdgemm.array_api.linalg import (
    matmul as matmul, matrix_transpose as matrix_transpose, tensordot as tensordot, vecdot as vecdot,
)  # fmt: skip
from pdgemm.tensors.indexing.tensor_sorting import argsort as argsort, sort as sort

__array_api_version__ = "2025.12"
