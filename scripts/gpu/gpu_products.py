"""Products on GPUs for `gpu_measures.py`: correctness, speed relative to cuBLAS, and seconds of transfers.

A product of all ranks takes turns with a baseline: a product of the same size on rank 0, while the other ranks wait.
The result is the median of the ratios time(baseline) / time(pdgemm) of the pairs.  The baseline is the fastest of
the BLAS call that pdgemm makes, cupy.matmul and torch.mm.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.local.arrays import dtypes
from pdgemm.names import AnyName, ComputeType, DeviceName, MoverName
from pdgemm.schedules.mover_registry import AUTO, mover_choices

MOVERS = tuple(x for x in mover_choices() if x != AUTO)
DTYPES = tuple(str(x) for x in dtypes.OPERANDS if dtypes.TYPE[x].c_name)
FAST = ("float64", "float32", "tf32", "bfloat16", "float16")  # the types that are timed
PANEL_BYTES = 1 << 25


def usable(grid: Any, device: DeviceName) -> Iterator[MoverName]:
    """Yield the movers that work on this machine with the ranks of the grid."""
    from pdgemm import DistMatrix, PdgemmError, plan

    A = DistMatrix.zeros((8, 8), grid=grid, device=device)
    if grid.size == 1:
        yield "auto"
    for mover in map(AnyName, MOVERS if grid.size > 1 else ()):
        try:
            plan(A, A, mover=mover)
        except PdgemmError:
            continue
        yield mover


def hardware(grid: Any, device: str) -> dict[str, Any]:
    from mpi4py import MPI

    found: dict[str, Any] = {
        "mpi": MPI.Get_library_version().split(",")[0].split("\n")[0],
        "host": platform.processor(),
    }
    if device == "cuda":
        import cupy

        from pdgemm.local.arrays.device import device_named

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        cuda = device_named("cuda")
        assert cuda is not None
        found |= {
            "gpu": properties["name"].decode(),
            "gpus": len(set(grid.comm.allgather(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice())))),
            "cuda": cupy.cuda.runtime.runtimeGetVersion(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "cupy": cupy.__version__,
            "reach": str(cuda.reach(grid)),
        }
    return found


def correct(grid: Any, device: DeviceName, mover: MoverName) -> Iterator[dict[str, Any]]:
    """Run every type and algorithm with ragged blocks, and yield the residual check and the counts of each."""
    from pdgemm import DistMatrix, pdgemm, verify

    for dtype in DTYPES:
        into = dtypes.TYPE[np.dtype(dtype)].sums_dtype
        whole = dtype == "int8"
        made: dict[str, Any] = {"grid": grid, "device": device, "block": (67, 31), "dtype": dtype}
        for algorithm in ("summa", "stationary_a", "cannon", "2.5d", "inner"):
            if algorithm == "2.5d" and grid.size == 1:
                continue
            if whole:
                A, B = (DistMatrix.from_function(_small, x, **made) for x in ((301, 517), (517, 203)))
            else:
                A, B = (DistMatrix.random(x, seed=s, **made) for s, x in enumerate(((301, 517), (517, 203))))
            C = DistMatrix.zeros((301, 203), grid=grid, dtype=into, device=device)
            torus = (2, 2) if grid.size == 4 else (1, grid.size)  # on 2 x 2, blocks of B are shifted, too
            shape = torus if algorithm == "cannon" else None
            pdgemm(2, A, B, 1, C, mover=mover, algorithm=algorithm, shape=shape)
            report = C.report
            yield {
                "mover": mover,
                "moved_by": report.mover,
                "algorithm": algorithm,
                "dtype": dtype,
                "right": verify(C, 2, A, B, 0, None, accumulate_dtype=into).passed,
                "as_predicted": report.counted == report.predicted,
                "words_received": report.counted.words_received,
                "words_read": report.counted.words_read,
            }


def _small(i: Any, j: Any) -> Any:
    """Return elements that are 8-bit integers."""
    return (7 * i + 3 * j) % 251 - 125


def products(
    grid: Any, device: DeviceName, movers: Sequence[MoverName], n: int, what: str, repeats: int, **options: Any
) -> Iterator[dict[str, Any]]:
    """Time rank 0's baseline, the shares and the product in turns, and yield the ratios of times for each mover.

    The baseline is the fastest of `baselines`.  For the shares, all ranks multiply local matrices of their shares'
    sizes at the same time: the time slices of a shared GPU allow no faster product.  All operands are random numbers,
    because GPUs are faster on constant ones.
    what : the type of the operands; "tf32" is float32 that may be rounded to 11 bits.
    options : options of `plan`; the default algorithm is "auto" for the mover "auto", and otherwise "summa", which
        sends all panels by the mover.
    """
    from pdgemm import DistMatrix, plan

    dtype = "float32" if what == "tf32" else what
    compute: ComputeType | None = "tf32" if what == "tf32" else None
    made: dict[str, Any] = {"grid": grid, "dtype": dtype, "device": device}
    A, B = (DistMatrix.random((n, n), seed=s, **made) for s in (1, 2))
    C = DistMatrix.empty((n, n), **made)
    by, alone = fastest(baselines(n, dtype, device, what == "tf32")) if grid.comm.rank == 0 else ("", None)
    pr, pc = grid.shape
    share = single(n // pr, n // pc, n, dtype, device, what == "tf32")
    for mover in movers:
        how = {"algorithm": "auto" if mover == "auto" else "summa"} | options
        product = plan(A, B, C, mover=mover, compute_type=compute, **how).prepare(A, B, C)
        times = in_turns(grid.comm, (alone, share, product), repeats)
        report = C.report
        yield {
            "n": n,
            "dtype": what,
            "mover": mover,
            "algorithm": report.algorithm,
            "alone": by,
            "alone_seconds": median(x for x, _, _ in times),
            "seconds": median(x for _, _, x in times),
            "ratio": median(x / y for x, _, y in times),
            "of_shares": median(x / y for _, x, y in times),
            "tflops": 2 * n**3 / median(x for _, _, x in times) / 1e12,
            "overlap": report.overlap,
            "compute_share": report.compute_seconds / report.seconds,
            "extra_bytes": report.extra_bytes,
            "as_predicted": report.as_predicted,
        }


def in_turns(comm: Any, works: Sequence[Callable[[], object] | None], repeats: int) -> list[list[float]]:
    """Return the seconds of each function in each of `repeats` rounds, after a first round that is not counted.

    Each round begins with another function, because the clock rate of a GPU that was idle or is hot differs.
    """
    rounds = []
    for first in range(repeats + 1):
        order = [(first + place) % len(works) for place in range(len(works))]
        seconds = {number: timed(comm, works[number]) for number in order}
        rounds.append([seconds[number] for number in range(len(works))])
    return rounds[1:]


def baselines(n: int, dtype: str, device: str, tf32: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield products of the whole size on this rank only: by pdgemm's BLAS call, by CuPy, and by PyTorch.

    PyTorch may use cuBLASLt.  Libraries that are not installed, or do not support the type, are left out.
    """
    yield "the call of pdgemm", single(n, n, n, dtype, device, tf32)
    if device != "cuda":
        return
    with suppress(Exception):
        yield "cupy.matmul", by_cupy(n, dtype, tf32)
    with suppress(Exception):
        yield "torch.mm", by_torch(n, dtype, tf32)


def by_cupy(n: int, dtype: str, tf32: bool) -> Callable[[], None]:
    import cupy

    if tf32 or dtype in dtypes.HALF_NAMES:
        raise TypeError("CuPy rounds as its own settings say")
    A, B = (cupy.random.random((n, n), dtype) for _ in range(2))
    C = cupy.empty((n, n), dtype)

    def run() -> None:
        cupy.matmul(A, B, out=C)
        cupy.cuda.get_current_stream().synchronize()

    return run


def by_torch(n: int, dtype: str, tf32: bool) -> Callable[[], None]:
    torch: Any = import_module("torch")
    kind = getattr(torch, dtype)
    A, B = (torch.rand((n, n), device="cuda", dtype=kind) for _ in range(2))
    C = torch.empty((n, n), device="cuda", dtype=kind)

    def run() -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.mm(A, B, out=C)
        torch.cuda.synchronize()

    return run


def fastest(works: Iterable[tuple[str, Callable[[], None]]]) -> tuple[str, Callable[[], None]]:
    """Return the fastest function in three runs after a first one, and its name; functions that raise are left out."""

    def seconds(work: Callable[[], None]) -> float:
        times = []
        for _ in range(4):
            start = perf_counter()
            try:
                work()
            except Exception:  # another library does not multiply this type, or lacks memory
                return inf
            times.append(perf_counter() - start)
        return min(times[1:])

    return min(works, key=lambda x: seconds(x[1]))


def single(m: int, n: int, k: int, dtype: str, device: str, tf32: bool = False) -> Callable[[], None]:
    """Return a function that multiplies m x k by k x n on this rank only, by the BLAS that pdgemm calls."""
    from pdgemm.local.arrays import device as devices
    from pdgemm.local.arrays.element_functions import element_function, fill
    from pdgemm.local.blas.local_gemm import prepare

    where = devices.device_named(device)
    wide = np.dtype(dtype) if where or dtype not in dtypes.HALF_NAMES else np.dtype(np.float32)
    A, B, C = (devices.empty(shape, wide, "C", where) for shape in ((m, k), (k, n), (m, n)))
    for seed, x in enumerate((A, B)):  # all digits are random: with fewer, a GPU needs less power and is faster
        (rows, cols), uniform = (np.arange(size) for size in x.shape), element_function("uniform", seed, wide)
        if where is None:
            fill(x, rows, cols, uniform)
        else:
            where.generate(x, rows, cols, uniform)
    multiply = prepare(1, A, B, C, tf32=tf32)

    def run() -> None:
        multiply(0)
        if where:
            where.current_stream().synchronize()

    return run


def timed(comm: Any, work: Callable[[], object] | None) -> float:
    comm.Barrier()
    start = perf_counter()
    if work:
        work()
    comm.Barrier()
    return float(comm.bcast(perf_counter() - start))


def transfers(grid: Any, device: str, mover: str, repeats: int) -> dict[str, Any]:
    """Time a thin product in which each rank sends one panel to all ranks of its row, and return its bandwidth."""
    from pdgemm import DistMatrix, plan

    words = PANEL_BYTES // 8
    made: dict[str, Any] = {"grid": grid, "device": device}
    A = DistMatrix.zeros((words // 64, 64 * grid.size), **made)
    B = DistMatrix.zeros((64 * grid.size, 8), **made)
    C = DistMatrix.empty((words // 64, 8), **made)
    options = {"algorithm": "summa", "mover": mover, "panel_width": 64, "shape": (1, grid.size)}
    product = plan(A, B, C, **options).prepare(A, B, C)  # type: ignore[arg-type]
    seconds = sorted(timed(grid.comm, product) for _ in range(repeats))
    words = C.report.counted.words_received
    p50, p99 = seconds[repeats // 2], seconds[repeats * 99 // 100]
    return {"mover": mover, "bytes": 8 * words, "p50": p50, "p99": p99, "gb_per_s": 8 * words / p50 / 1e9}
