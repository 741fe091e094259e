#!/usr/bin/env python3
"""The measurements of `gpu_first.py` on GPUs: mpiexec -n RANKS python scripts/gpu/gpu_measures.py NAME [--small].

The last line of output is a JSON list of findings: what, expected, measured, and passed (null: reported, not judged).
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import click
import gpu_products
import numpy as np

from pdgemm.devices import gpu_binding
from pdgemm.names import DType

TYPES = ("int8", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
GOALS = dict.fromkeys([(1, "float64"), (1, "float32"), (1, "bfloat16"), (4, "float64")], 0.97)  # at the largest n


class Finding(NamedTuple):
    what: str
    expected: str
    measured: str
    passed: bool | None = None


def environment(grid: Any, small: bool) -> Iterator[Finding]:
    """Hardware, drivers and libraries of this machine; and whether kernels can be compiled."""
    from pdgemm import DistMatrix

    DistMatrix.zeros((8, 8), grid=grid, device="cuda")
    for name, value in gpu_products.hardware(grid, "cuda").items():
        yield Finding(name, "", str(value))
    import cupy

    nccl = cupy.cuda.nccl
    yield Finding("NCCL", "", str(nccl.get_version()) if nccl.available else "none")
    if shutil.which("nvidia-smi") and grid.comm.rank == 0:
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,mig.mode.current,clocks.sm", "--format=csv"]
        print(subprocess.run(asked, capture_output=True, text=True, check=False).stdout)
    start = perf_counter()
    X, Y = _device().to_device(np.arange(6.0).reshape(2, 3), "C"), _device().empty((2, 3), "float32")
    _convert(Y, X)
    right = bool((_device().to_host(Y) == np.arange(6).reshape(2, 3)).all())
    yield Finding("a kernel", "compiled, and right", f"{'right' if right else 'wrong'}, {_since(start)}", right)


def reach(grid: Any, small: bool) -> Iterator[Finding]:
    """How ranks that share a GPU reach each other's memory."""
    from pdgemm import DistMatrix

    DistMatrix.zeros((8, 8), grid=grid, device="cuda")
    found = _device().reach(grid)
    alone = grid.size == 1
    yield Finding("CUDA IPC", "works", found.reads or "no", alone or bool(found.reads))
    yield Finding("ranks that share a GPU", f"{grid.size} on one", str(found.sharing))
    yield Finding("all of it", "", str(found))


def nccl(grid: Any, small: bool) -> Iterator[Finding]:
    """NCCL with a communicator of one rank: the library, the type names, groups, streams, and an abort."""
    from pdgemm import DistMatrix
    from pdgemm.devices import cuda_nccl

    DistMatrix.zeros((8, 8), grid=grid, device="cuda")
    device, comm = _device(), grid.comm.Split(grid.comm.rank)
    yield Finding("a communicator of one rank, and a broadcast", "arrives", "", cuda_nccl.nccl_arrives(comm, device))
    for dtype in map(np.dtype, cuda_nccl._TYPES):
        numbers = np.arange(1000).astype(dtype)
        x, arrived, total = device.to_device(numbers, "C"), *(device.empty((1000,), dtype) for _ in range(2))
        with device.transfer_stream:
            cuda_nccl.nccl_exchange(device, comm, [(x, 0)], [(arrived, 0)])
            cuda_nccl.nccl_reductions(device, comm, [(x, total, 0)])
        device.transfer_stream.synchronize()
        right = all(np.array_equal(device.to_host(y), numbers) for y in (arrived, total))
        yield Finding(f"{dtype}: a message to itself, and a sum", "right", "right" if right else "wrong", right)
    start = perf_counter()
    cuda_nccl.leave_operations("it is tried")
    yield Finding("abort", "returns", _since(start), True)


def copies(grid: Any, small: bool) -> Iterator[Finding]:
    """Bandwidth of copies between memory orders, relative to contiguous memory; samples of each copy are checked."""
    high, wide, ld = (64, 48, 96) if small else (16384, 2048, 16384)
    for dtype in map(np.dtype, ("float64", "float32", "bfloat16", "float16", "complex128", "int8")):
        device, peak = _device(), 0.0
        row = np.arange(ld) % 97
        for name, source, target in (
            ("contiguous", "C", "C"),
            ("C from C", "C", "C"),
            ("F from F", "F", "F"),
            ("F from C", "C", "F"),
            ("C from F", "F", "C"),
        ):
            width = wide if name == "contiguous" else ld
            shape = (high, width) if source == "C" else (width, high)
            whole = np.resize(row[:width], shape)
            X = _upright(device.to_device(whole.astype(dtype), "C"), source)[:high, :wide]
            Y = device.empty((high, wide), dtype, target)
            seconds = _by_events(partial(_convert, Y, X), 3 if small else 20)
            few = slice(high - 3, None), slice(wide - 5, None)
            right = np.array_equal(device.to_host(_packed(Y[few])), _upright(whole, source)[:high, :wide][few])
            speed = 2 * Y.nbytes / max(seconds, 1e-12) / 1e9
            peak = peak or speed
            least = 0.5 if source == target else 0.1
            fast = small or speed >= least * peak
            told = f"{speed:.0f} GB/s, {speed / peak:.2f} of contiguous{'' if right else ', WRONG'}"
            yield Finding(f"{dtype} {name}", f"right, >= {least} of contiguous", told, right and fast)


def bandwidth(grid: Any, small: bool) -> Iterator[Finding]:
    """Bandwidth of copies between the host and the GPU, and of computing and reducing elements on the GPU."""
    from pdgemm import DistMatrix

    DistMatrix.zeros((8, 8), grid=grid, device="cuda")
    device, words = _device(), 1 << (12 if small else 25)
    x, pinned, host = device.empty((words,), "float64"), device.pinned(words, "float64"), np.zeros(words)
    x[...], shape = 1.0, (words // 256, 256)
    A = DistMatrix.random(shape, grid=grid, device="cuda")
    works: dict[str, Callable[[], object]] = {
        "pinned memory to the GPU": lambda: device.copy(x, pinned.device),
        "the GPU to pinned memory": lambda: device.copy(pinned.device, x),
        "to_device, from pageable memory": lambda: device.to_device(host, "C"),
        "to_host, to new memory": lambda: device.to_host(x),
        "uniform numbers on the GPU": lambda: DistMatrix.random(shape, grid=grid, device="cuda"),
        "uniform numbers on the host": lambda: DistMatrix.random(shape, grid=grid),
        "A.sum() on the GPU": A.sum,
        "A.max() on the GPU": A.max,
        "A.norm() on the GPU": A.norm,
    }
    for name, work in works.items():
        seconds = _by_clock(work)
        yield Finding(name, "", f"{8 * words / seconds / 1e9:.1f} GB/s, {1e3 * seconds:.3f} ms for {8 * words} bytes")


def aligned(grid: Any, small: bool) -> Iterator[Finding]:
    """Rates of products whose rows begin at multiples of 16 bytes or not, in all three arrays or in one of them."""
    from pdgemm import DistMatrix
    from pdgemm.local.blas.local_gemm import prepare

    DistMatrix.zeros((8, 8), grid=grid, device="cuda")
    n = 64 if small else 8192
    for dtype in ("bfloat16", "float32", "float64"):
        for into, (more, first), skew in (
            *((dtype, x, "ABC") for x in ((0, 0), (8, 0), (1, 0), (8, 1))),
            *(("float32" if dtype == "bfloat16" else dtype, (1, 0), skew) for skew in ("", "A", "B", "C", "ABC")),
        ):
            arrays = []
            for name, kind in zip("ABC", (dtype, dtype, into)):
                apart, at = (n + more, first) if name in skew else (n, 0)
                x = _device().empty((n * apart + 8,), kind)
                x[...] = x.dtype.type(1)
                arrays.append(x[at : at + n * apart].reshape(n, apart)[:, :n])
            rate = 2 * n**3 / _by_clock(partial(prepare(1, *arrays), 0)) / 1e12
            where = f"rows of {skew or 'none'} {n + more} elements apart, from element {first}"
            yield Finding(f"{dtype} to {into}, {where}", "", f"{rate:.1f} TFLOP/s")


def integers(grid: Any, small: bool) -> Iterator[Finding]:
    """Products of int8 matrices in several memory orders, relative to cuBLAS with both operands contiguous along k."""
    from pdgemm import DistMatrix, plan, verify
    from pdgemm.local.blas.local_gemm import prepare

    DistMatrix.zeros((8, 8), grid=grid, device="cuda")
    for n in (64, 65) if small else (4096, 8192, 8193, 16384):
        whole = n - n % 16
        made: dict[str, Any] = {"grid": grid, "dtype": "int8", "device": "cuda"}
        left, right = (_device().to_device(_some_bytes(whole, x), "C") for x in (1, 2))
        alone = _by_clock(partial(prepare(1, left, right.T, _device().empty((whole, whole), "int32")), 0))
        rate = f"{2 * whole**3 / alone / 1e12:.1f} TOP/s"
        yield Finding(f"cuBLAS, n = {whole}", "", rate)
        for orders in ("CF", "CC", "FC"):
            A, B = (DistMatrix.random((n, n), seed=x, **made | {"order": order}) for x, order in enumerate(orders))
            C = DistMatrix.empty((n, n), dtype="int32", grid=grid, device="cuda")
            seconds = _by_clock(plan(A, B, C).prepare(A, B, C))
            told = f"{2 * n**3 / seconds / 1e12:.1f} TOP/s, {alone / seconds * (n / whole) ** 3:.2f} of cuBLAS's"
            right = verify(C, 1, A, B).passed
            yield Finding(f"A and B in orders {orders}, n = {n}", "exact", told + ", WRONG" * (not right), right)


def factors(grid: Any, small: bool) -> Iterator[Finding]:
    """Cholesky, LU and QR compared with CuPy's, which call cuSOLVER for the whole matrix; residuals are judged."""
    from pdgemm import DistMatrix, linalg

    for n in (64,) if small else (4096, 16384):
        A = DistMatrix.random((n, n), seed=1, grid=grid, device="cuda")
        S = A + A.T + 2 * n * DistMatrix.eye(n, grid=grid, device="cuda")
        x = DistMatrix.random((n, 1), seed=2, grid=grid, device="cuda")
        solutions = linalg.cho_solve(linalg.cholesky(S), S @ x), linalg.lu_solve(linalg.lu_factor(A), A @ x)
        for name, M, y in zip(("Cholesky", "LU"), (S, A), solutions):
            residual = float((M @ y - M @ x).norm() / (M.norm() * y.norm() * n * np.finfo(float).eps))
            yield Finding(f"{name}, n = {n}, |A y - b| / (|A| |y| n eps)", "<= 1", f"{residual:.1e}", residual <= 1)
        ours: dict[str, tuple[float, Callable[[], object]]] = {
            "Cholesky": (n**3 / 3, partial(linalg.cholesky, S)),
            "LU": (2 * n**3 / 3, partial(linalg.lu_factor, A)),
            "QR": (4 * n**3 / 3, partial(linalg.householder_qr, A, want_q=False)),
        }
        others = {} if small or grid.size > 1 else _cupys_factors(A.local, S.local)
        for name, (flops, work) in ours.items():
            seconds = _by_clock(work, 3)
            told = f"{flops / seconds / 1e12:.2f} TFLOP/s"
            if name in others:
                told += f", {_by_clock(others[name], 3) / seconds:.2f} of CuPy's"
            yield Finding(f"{name}, n = {n}", "", told)


def _cupys_factors(A: Any, S: Any) -> dict[str, Callable[[], object]]:
    import cupy
    import cupyx.scipy.linalg

    return {
        "Cholesky": lambda: cupy.linalg.cholesky(S),
        "LU": lambda: cupyx.scipy.linalg.lu_factor(A, check_finite=False),
        "QR": lambda: cupy.linalg.qr(A, mode="r"),
    }


def edges(grid: Any, small: bool) -> Iterator[Finding]:
    """Infinities, NaN, subnormals, and 16-bit sums at the limit of exact integers, on one rank or several."""
    from pdgemm import DistMatrix, pdgemm

    def of(x: np.ndarray, dtype: DType) -> Any:
        return DistMatrix.from_function(lambda i, j: x[i, j], x.shape, dtype=dtype, grid=grid, device="cuda")

    x = np.array([[complex(math.inf, 0)]])
    one = _device().to_device(x, "C")
    _added(one, _device().to_device(np.array([[1 + 2j]]), "C"))
    found = complex(_device().to_host(one)[0, 0])
    yield Finding("complex Inf + 1 + 2i", "(inf+2j)", str(found), found == complex(math.inf, 2))
    n = 40
    A, B = (of(np.ones((n, n)), "float64") for _ in range(2))
    C = of(np.full((n, n), math.nan), "float64")
    pdgemm(1, A, B, 0, C)
    yield Finding("NaN in C where beta is 0", "not read", "", bool((C.allgather() == n).all()))
    A[3:4, 5:6] = math.inf
    pdgemm(1, A, B, 0, C)
    rows = np.isinf(C.allgather()).any(axis=1)
    yield Finding(
        "Inf in row 3 of A",
        "only in row 3 of C",
        str(np.flatnonzero(rows).tolist()),
        list(np.flatnonzero(rows)) == [3],
    )
    tiny = of(np.full((n, n), 1e-40), "float32")
    pdgemm(1, tiny, of(np.eye(n), "float32"), 0, D := of(np.zeros((n, n)), "float32"))
    yield Finding("float32 subnormals", "kept, or 0 in copies", f"{float(D.allgather()[0, 0]):.3g}")
    for dtype in ("float16", "bfloat16"):
        k = 1 << (9 if small else 17)
        A = DistMatrix.from_function(_ones, (256, k), dtype=dtype, grid=grid, device="cuda")
        B = DistMatrix.from_function(_ones, (k, 256), dtype=dtype, grid=grid, device="cuda")
        C = DistMatrix.zeros((256, 256), dtype=dtype, grid=grid, device="cuda")
        pdgemm(2.0**-4, A, B, 0, C)
        values = np.unique(C.allgather().astype(float))
        exact = values.tolist() == [k / 16]
        yield Finding(f"{dtype} ones, k = {k}, alpha = 1/16", str(k / 16), str(values[:4].tolist()), exact)


def correct(grid: Any, small: bool) -> Iterator[Finding]:
    """Every type, algorithm and mover, with ragged blocks: the residual check, and counted words against the plan."""
    for mover in gpu_products.usable(grid, "cuda"):
        found = [*gpu_products.correct(grid, "cuda", mover)]
        for key in ("right", "as_predicted"):
            bad = [f"{x['algorithm']} {x['dtype']}" for x in found if not x[key]]
            told = f"{len(found) - len(bad)} of {len(found)}" + f"; not {', '.join(bad)}" * bool(bad)
            yield Finding(f"{mover}, {key.replace('_', ' ')}", "all", told, not bad)


def ratio(grid: Any, small: bool) -> Iterator[Finding]:
    """Speed of products, relative to the BLAS of one rank and to products of all ranks' shares without pdgemm."""
    sizes = [48, 64] if small else [4096, 8192, 16384] if grid.size == 1 else [16384]
    types = gpu_products.FAST if grid.size == 1 else ("float64", "float32", "bfloat16")
    movers = [x for x in gpu_products.usable(grid, "cuda") if x in ("auto", "shared", "ipc", "nccl", "staged")]
    for n in sizes:
        for what in types:
            for x in gpu_products.products(grid, "cuda", movers, n, what, 6):
                goal = GOALS.get((grid.size, what)) if n == sizes[-1] and x["mover"] in ("auto", "shared") else None
                told = f"{x['ratio']:.3f} of {x['alone']}, {x['of_shares']:.3f} of {grid.size} products without pdgemm"
                told += f" at a time, {x['tflops']:.1f} TFLOP/s, products {x['compute_share']:.2f}"
                told += f" of the time, {x['overlap']:.2f} of transfers hidden" if x["overlap"] is not None else ""
                name = f"{what}, n = {n}, {x['mover']}"
                reached = x["ratio"] if grid.size == 1 else x["of_shares"]
                passed = None if goal is None else bool(small or reached >= goal)
                yield Finding(name, f">= {goal}" if goal else "", told, passed)


def algorithms(grid: Any, small: bool) -> Iterator[Finding]:
    """For each algorithm and mover: the rate, and whether counted words equal predicted ones."""
    from pdgemm.errors import ArgumentError, DeviceError

    ways: dict[str, dict[str, Any]] = {
        "summa": {"shape": (2, 2)} if grid.size == 4 else {},
        "cannon": {"shape": (2, 2) if grid.size == 4 else (1, grid.size)},
        "2.5d": {"shape": (1, 1), "layers": grid.size},
    }
    movers = [
        x for x in gpu_products.usable(grid, "cuda") if x in ("auto", "shared", "ipc", "ring", "ibcast", "staged")
    ]
    for dtype in ("float64", "bfloat16"):
        for (algorithm, options), mover in product(ways.items(), movers):
            name, n = f"{algorithm}, {dtype}, {mover}", 64 if small else 8192
            try:
                for x in gpu_products.products(grid, "cuda", [mover], n, dtype, 3, algorithm=algorithm, **options):
                    told = f"{x['ratio']:.3f} of {x['alone']}, {x['tflops']:.1f} TFLOP/s"
                    yield Finding(name, "words as predicted", told, x["as_predicted"])
            except (ArgumentError, DeviceError) as error:  # raised by the plan on all ranks
                yield Finding(name, "", f"not possible: {error}")


def transfers(grid: Any, small: bool) -> Iterator[Finding]:
    """Seconds in which each rank sends a panel of 32 MiB to all, for each mover."""
    if small:
        gpu_products.PANEL_BYTES = 1 << 14
    for mover in gpu_products.usable(grid, "cuda"):
        if mover not in ("auto", "shared", "mpi"):
            x = gpu_products.transfers(grid, "cuda", mover, 5 if small else 100)
            told = f"p50 {1e3 * x['p50']:.3f} ms, p99 {1e3 * x['p99']:.3f} ms, {x['gb_per_s']:.1f} GB/s"
            yield Finding(f"{mover}, {x['bytes'] / 1e6:.0f} MB", "", told)


def large(grid: Any, small: bool) -> Iterator[Finding]:
    """A float32 matrix of more than 2^31 elements times the identity; samples of C are compared with known elements."""
    from pdgemm import DistMatrix, pdgemm
    from pdgemm.local.arrays.element_functions import element_function

    n, ends = 96 if small else 47104, 40
    uniform = element_function("uniform", 5, np.dtype(np.float32))
    for block in (None, 100):
        made: dict[str, Any] = {"grid": grid, "dtype": "float32", "device": "cuda", "block": block}
        A, B = DistMatrix.random((n, n), seed=5, **made), DistMatrix.eye(n, **made)
        C = DistMatrix.full((n, n), math.nan, **made)
        start = perf_counter()
        pdgemm(1, A, B, 0, C)
        took, right = _since(start), True
        for first in (0, n // 2, n - ends):
            i, j = np.arange(first, first + ends), np.arange(n)
            right &= np.array_equal(C[first : first + ends, :].allgather(), uniform(i[:, None], j[None, :]))
            right &= np.array_equal(C[:, first : first + ends].allgather(), uniform(j[:, None], i[None, :]))
        told = f"{'right' if right else 'WRONG'}, {n * n / 2**31:.2f} x 2^31 elements, {took} with planning"
        yield Finding(f"n = {n}, {block or 'one'} block{'s of 100' * bool(block)}", "samples right", told, right)


def many(grid: Any, small: bool) -> Iterator[Finding]:
    """A thousand products, prepared, not prepared and as a batch: microseconds of a call, and memory not freed."""
    import cupy

    from pdgemm import Batch, DistMatrix, matmul_batched, pdgemm, plan

    calls, pool = 20 if small else 1000, cupy.get_default_memory_pool()
    for n in (16, 32) if small else (256, 512, 1024, 2048):
        A, B, C = (DistMatrix.random((n, n), seed=s, grid=grid, device="cuda") for s in range(3))
        product = plan(A, B, C).prepare(A, B, C)
        for name, call in (("prepared", product), ("not prepared", lambda A=A, B=B, C=C: pdgemm(1, A, B, 0, C))):
            call(), grid.comm.Barrier()
            used, (free, _) = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()
            times = [gpu_products.timed(grid.comm, call) for _ in range(calls)]
            grid.comm.Barrier()
            left, gone = pool.used_bytes() - used, free - cupy.cuda.runtime.memGetInfo()[0]
            told = f"{1e6 * median(times):.0f} us a call, {left} bytes left in the pool, {gone} on the GPU"
            yield Finding(f"{calls} x n = {n}, {name}", "nothing left", told, left <= 0 and gone <= 1 << 26)
    for dtype in ("float32", "float64", "complex64"):
        left, right = (
            Batch.from_local([cupy.ones((64 - x % 32, 33 + x % 31), dtype) for x in range(calls)], grid.comm)
            for _ in range(2)
        )
        whole = matmul_batched(left, right, transb="T")
        seconds = _by_clock(partial(matmul_batched, left, right, whole, transb="T", check=False))
        exact = all((_device().to_host(x) == 33 + number % 31).all() for number, x in enumerate(whole.items))
        told = f"{1e6 * seconds / calls:.2f} us a product{'' if exact else ', WRONG'}"
        yield Finding(f"{calls} unequal products of extents from 33 to 64, {dtype}, one batch", "right", told, exact)


def traced(grid: Any, small: bool) -> Iterator[Finding]:
    """The timeline of a product, and the part of its transfers that is hidden, by the GPU's events."""
    from pdgemm import DistMatrix, pdgemm
    from pdgemm.tools.profiling.trace_file import trace

    n, path = 64 if small else 8192, Path(f"trace-{grid.size}.json")
    A, B = (DistMatrix.random((n, n), seed=s, grid=grid, device="cuda") for s in (1, 2))
    pdgemm(1, A, B)
    for mover in gpu_products.usable(grid, "cuda"):
        with trace(path.with_stem(f"{path.stem}-{mover}"), grid):
            C = pdgemm(1, A, B, mover=mover)
        overlap = C.report.overlap
        told = "nothing was moved" if overlap is None else f"{overlap:.2f} hidden"
        yield Finding(f"n = {n}, {mover}", "", f"{told}, see {path.stem}-{mover}.json")


def calibrated(grid: Any, small: bool) -> Iterator[Finding]:
    """Calibrate the time model of this machine, and compare its predictions with measured products."""
    from pdgemm import DistMatrix, pdgemm
    from pdgemm.tools import calibrate
    from pdgemm.tools.calibrate.place import HOSTS

    if small:
        vars(calibrate)["GPUS"] = HOSTS._replace(side=64, copied=64, touched=64, words=64, moved=8, beside=(64, 64))
    machine = calibrate.calibrate(grid.comm, device="cuda")
    path = Path(f"machine-{grid.size}.json")
    if grid.comm.rank == 0:
        path.write_text(machine.as_json() + "\n")
        print(machine)
    for n in (64,) if small else (1024, 4096, 16384):
        for dtype in ("float64", "float32"):
            A, B = (DistMatrix.random((n, n), seed=s, dtype=dtype, grid=grid, device="cuda") for s in (1, 2))
            seconds = []
            for _ in range(5):
                grid.comm.Barrier()
                C = pdgemm(1, A, B, machine=machine)
                seconds.append(C.report.seconds)
            predicted, taken = C.report.predicted_seconds, grid.comm.allreduce(median(seconds)) / grid.size
            told = f"{predicted:.2e} s predicted, {taken:.2e} s measured, {predicted / taken:.2f}; see {path}"
            yield Finding(f"n = {n}, {dtype}, {C.report.algorithm}", "within a factor of 1.5", told)


# ---------------------------------------------------------------- shared functions
def _device() -> Any:
    from pdgemm.local.arrays.device import device_named

    return device_named("cuda")


def _convert(Y: Any, X: Any) -> None:
    from pdgemm.local.arrays.elementwise import CONVERT

    CONVERT(Y, X)


def _added(Y: Any, X: Any) -> None:
    from pdgemm.local.arrays.elementwise import Combine

    Combine(1, 1)(Y, X)


def _upright(x: Any, order: str) -> Any:
    return x if order == "C" else x.T


def _packed(x: Any) -> Any:
    made = _device().empty(x.shape, x.dtype)
    _convert(made, x)
    return made


def _by_events(work: Callable[[], None], repeats: int) -> float:
    """Return the mean seconds of a call, over `repeats` calls, by the GPU's clock."""
    stream = _device().current_stream()
    work()
    begin = stream.record()
    for _ in range(repeats):
        work()
    end = stream.record()
    end.synchronize()
    return float(_device().elapsed(begin, end)) / repeats


def _by_clock(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a call, over `repeats` calls after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        work()
        _device().current_stream().synchronize()
        times.append(perf_counter() - start)
    return max(1e-9, median(times[1:]))


def _since(start: float) -> str:
    return f"{perf_counter() - start:.2f} s"


def _some_bytes(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, (n, n), np.int8)


def _ones(i: Any, j: Any) -> Any:
    return 1.0 + 0 * (i + j)


MEASURES: dict[str, Callable[[Any, bool], Iterator[Finding]]] = {
    x.__name__: x
    for x in (
        *(environment, reach, nccl, copies, edges, correct, ratio, algorithms, transfers, large, many, traced),
        *(bandwidth, aligned, integers, factors, calibrated),
    )
}


@click.command()
@click.argument("name", type=click.Choice([*MEASURES]))
@click.option("--small", is_flag=True, help="Use tiny sizes; speeds are not judged.")
@click.option("--no-pool", is_flag=True, help="Allocate each array separately, so that a sanitizer sees its bounds.")
def main(name: str, small: bool, no_pool: bool) -> None:
    """Run one measurement on all ranks, and print its findings."""
    gpu_binding.choose()
    if no_pool:
        import cupy

        cupy.cuda.set_allocator(None)
        cupy.cuda.set_pinned_memory_allocator(None)
    from mpi4py import MPI

    from pdgemm import ProcessGrid

    with ProcessGrid(MPI.COMM_WORLD) as grid:
        found = []
        for mine in MEASURES[name](grid, small):
            votes = grid.comm.allgather(mine.passed)
            passed = False if False in votes else mine.passed
            found.append(mine._replace(passed=passed)._asdict())
            if grid.comm.rank == 0:
                print(f"{mine.what}: {mine.measured}", file=sys.stderr, flush=True)
        if grid.comm.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
