#!/usr/bin/env python3
"""Compile all kernels of pdgemm for several generations of GPUs, by NVRTC; no GPU is needed.

    python scripts/gpu/compile_kernels.py [--arch 80 --arch 90 --arch 100]

It needs CuPy and NVRTC with CUDA's headers: pip install cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

import click
import cupy
import numpy as np
from cupy.cuda import nvrtc

from pdgemm.devices import generators, kernels
from pdgemm.local.arrays.dtypes import BLAS, TYPE, TYPES, can_convert

DTYPES = [x.dtype for x in TYPES if x.c_name]
NUMBERS = {"int64": "long long", "uint64": "unsigned long long"}


class Written:
    """The arguments of CuPy's ElementwiseKernel, which this class replaces."""

    def __init__(
        self, in_params: str, out_params: str, operation: str, name: str, options: tuple[str, ...] = ()
    ) -> None:
        self.params = [tuple(x.rsplit(" ", 1)) for x in (in_params + ", " + out_params).split(", ")]
        self.operation, self.name = operation, name

    def source(self, **letters: np.dtype) -> str:
        """Return the CUDA C++ source of the kernel for these types, with arrays as CuPy passes them."""
        heads, locals_ = [], []
        for kind, name in self.params:
            raw, letter = kind.startswith("raw "), kind.removeprefix("raw ")
            c = (
                TYPE[letters[letter]].c_name
                if letter in letters
                else NUMBERS.get(letter) or TYPE[np.dtype(letter)].c_name
            )
            if raw:
                dims = 1 if letter == "int64" else 2
                heads.append(f"CArray<{c}, {dims}, {int(dims == 1)}, {int(dims == 1)}> {name}")
            elif letter in letters:
                heads.append(f"CArray<{c}, 1, 0, 0> _{name}")
                locals_.append(f"{c} &{name} = _{name}[i]; ")
            else:
                heads.append(f"const {c} {name}")
        body = f"CUPY_FOR(i, size) {{ {''.join(locals_)}{self.operation}; }}"
        types = "".join(f"typedef {TYPE[x].c_name} {letter}; " for letter, x in letters.items())
        headers = ("complex", "carray", "float16", "bfloat16")
        return (
            "".join(f"#include <cupy/{name}.cuh>\n" for name in headers)
            + f'{types}\nextern "C" __global__ void {self.name}(ptrdiff_t size, {", ".join(heads)}) {{ {body} }}\n'
        )


def sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each kernel."""
    numbers = ("", "1", "alpha"), ("", "1", "beta")
    for X, Y in product(DTYPES, DTYPES):
        if not can_convert(X, Y):
            continue
        for alpha, beta, conjugates in product(*numbers, (False, True)):
            if (conjugates and X.kind != "c") or not (alpha or beta):
                continue
            form = kernels._Form(alpha, beta, conjugates)
            for access in kernels._ACCESS:
                yield f"{access} {X} to {Y}, {form}", kernels._kernel(X, Y, form, access).source(T=X, R=Y)
    for dtype, transposed in product(DTYPES, (False, True)):
        if not transposed:
            yield f"pick {dtype}", kernels._pick_kernel().source(T=dtype)
        if dtype in BLAS:
            yield f"triangle {dtype}", kernels._triangle_kernel(transposed, transposed).source(R=dtype)
        random = dtype.kind != "c" and dtype.name not in ("int32", "int64")
        for kind in ("eye", *["uniform"] * random, *["normal"] * (random and dtype.name != "int8")):
            yield f"{kind} {dtype}", generators._kernel(kind, dtype, transposed).source(R=dtype)


def wheels() -> list[str]:
    """Return the folders of CUDA's wheels, which contain its headers."""
    spec = find_spec("nvidia.cu13")
    return [*spec.submodule_search_locations] if spec and spec.submodule_search_locations else []


def compiled(source: str, arch: int, options: tuple[str, ...]) -> str:
    """Compile one kernel, and return the compiler's error messages; "" if it compiles."""
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-arch=sm_{arch}"))
    except nvrtc.NVRTCError:
        return str(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
    return ""


@click.command()
@click.option("--arch", "archs", multiple=True, type=int, default=(80, 90, 100), show_default=True)
def main(archs: tuple[int, ...]) -> None:
    """Compile all kernels for each compute capability, and print how many compile."""
    vars(cupy)["ElementwiseKernel"] = Written
    folders = [f"{cupy.__path__[0]}/_core/include"]
    folders += [f"{root}/{part}" for root in wheels() for part in ("include", "include/cccl")]
    options = ("--std=c++17", *(f"-I{folder}" for folder in folders))
    texts = {text: name for name, text in sources()}
    failed = 0
    for arch in archs:
        errors = {name: error for text, name in texts.items() if (error := compiled(text, arch, options))}
        for name, error in errors.items():
            print(f"sm_{arch}, {name}: {error[:600]}")
        print(f"sm_{arch}: {len(texts) - len(errors)} of {len(texts)} kernels compile")
        failed += len(errors)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
