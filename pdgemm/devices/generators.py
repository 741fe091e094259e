"""Elements that are functions of their global indices, computed on a GPU with the same bits as on the host.

One kernel computes the hash of `element_functions.hashed`, integers of 64 bits, and scales it by a power of two,
without rounding.  Normal random numbers use only operations that IEEE 754 defines (`normal_numbers`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import TYPE
from pdgemm.local.arrays.element_functions import GOLDEN, STATEMENTS, KnownFunction, hash_start, numbered, random_bits

_WORD = "unsigned long long"
_MIX = "h ^= h >> 30; h *= 0xBF58476D1CE4E5B9ULL; h ^= h >> 27; h *= 0x94D049BB133111EBULL; h ^= h >> 31"
_TIMES = f" * 0x{int(GOLDEN):X}ULL"


def generate(target: Array, rows: np.ndarray, cols: np.ndarray, f: Any) -> bool:
    """Start target[l, h] := f(rows[l], cols[h]) in the current stream; return False where no kernel computes f."""
    if not isinstance(f, KnownFunction) or not TYPE[target.dtype].c_name:
        return False
    if not target.size:
        return True
    if f.kind == "constant":
        target[...] = target.dtype.type(f.value)
        return True
    random = f.kind in ("uniform", "normal")
    if random and f.dtype != target.dtype:
        return False
    transposed = target.strides[0] < target.strides[1]  # neighbouring threads write neighbouring elements
    words = [target.T if transposed else target]
    if random and target.dtype.kind == "c":
        words = _real_words(words[0])
    indices, width = [cupy.asarray(x.astype(np.int64)) for x in (rows, cols)], words[0].shape[1]
    for part, word in enumerate(words):
        start = hash_start(f.seed, numbered(2 * part + (f.kind == "normal")))[0]
        _kernel(f.kind, word.dtype, transposed)(*indices, np.int64(width), start, word, size=word.size)
    return True


def _real_words(x: Array) -> list[Array]:
    """Return the real and the imaginary parts of complex elements as arrays of real numbers in the same memory."""
    real = np.empty(0, x.dtype).real.dtype
    words = cupy.ndarray((*x.shape, 2), real, x.data, (*x.strides, real.itemsize))
    return [words[..., part] for part in range(2)]


@lru_cache(64)
def _kernel(kind: str, dtype: np.dtype, transposed: bool) -> Any:
    """Return the kernel of an element function; transposed: y is the transpose of the matrix."""
    outer, inner = ("col", "row") if transposed else ("row", "col")
    lines = [f"ptrdiff_t {outer} = i / width, {inner} = i % width", f"ptrdiff_t to[] = {{{outer}, {inner}}}"]
    if kind != "eye":
        lines += [f"{_WORD} h = static_cast<{_WORD}>(rows[row]){_TIMES} + start", _MIX]
        lines += [f"h += static_cast<{_WORD}>(cols[col]){_TIMES}", _MIX]
    lines += STATEMENTS if kind == "normal" else []
    lines.append(f"y[to] = static_cast<{TYPE[dtype].c_name}>({_value(kind, dtype)})")
    head = "raw int64 rows, raw int64 cols, int64 width, uint64 start"
    options = ("--fmad=false",)  # as on the host, multiplications are not fused with additions
    return cupy.ElementwiseKernel(head, "raw R y", "; ".join(lines), f"pdgemm_{kind}", options=options)


def _value(kind: str, dtype: np.dtype) -> str:
    """Return the C expression of an element."""
    if kind == "eye":
        return "static_cast<float>(rows[row] == cols[col])"
    if kind == "normal":
        return "v" if dtype == np.float64 else "static_cast<float>(v)"
    if dtype.kind in "iu":
        return f"h >> {64 - 8 * dtype.itemsize}"
    bits, wide = random_bits(dtype), "double" if dtype == np.float64 else "float"
    return f"static_cast<{wide}>(h >> {64 - bits}) * static_cast<{wide}>({0.5**bits!r})"
