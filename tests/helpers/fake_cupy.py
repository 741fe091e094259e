"""CuPy without a GPU: the parts of CuPy, cuBLAS, CUDA's runtime and driver and NCCL that `pdgemm.devices` calls.

They accept and reject the same arguments as the originals (CuPy 14.2's sources, CUDA's manuals): cuBLAS reads matrices
by address and leading dimension (fake_cublas.py), kernels are C source, CUDA IPC maps allocations of other processes
(here unnamed files in memory, fake_cuda.py).  All work is done immediately; fake_device.py simulates delayed work.
Only operations of NCCL may never finish (`Nccl.stuck`, fake_nccl.py); work after them in a stream then does not finish
either.  cuSOLVER is in fake_cusolver.py.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import count
from math import prod
from time import sleep
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_arrays import FakeArray
from fake_cuda import CUDADriverError, Gpu, OutOfMemoryError, Pool, Unowned
from fake_cusolver import Cusolver
from fake_nccl import Nccl
from scipy.special import erfc

# modules of pdgemm.devices that import CuPy
MODULES = "cuda", "cuda_ipc", "cuda_nccl", "cusolver", "generators", "grouped_gemm", "kernels"

_TYPES = {"float": "f4", "double": "f8", "complex<float>": "c8", "complex<double>": "c16"}
_TYPES |= {"long long": "i8", "int": "i4", "signed char": "i1", "float16": "f2", "bfloat16": ml_dtypes.bfloat16}
_TYPES |= {"unsigned long long": "u8"}


class Simulated:
    """The contents of the module cupy, and of the libraries that it calls."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.pool = gpu, Pool(gpu)
        simulated = self
        self.streams = [Stream(self)]
        gpu.current_stream = lambda: self.streams[-1].ptr

        class ndarray(FakeArray):
            """An array at an address."""

            def __init__(
                self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: Any = "C"
            ) -> None:
                dtype = np.dtype(dtype)
                if memptr is None:
                    memptr = MemoryPointer(simulated.pool.take(prod(shape) * dtype.itemsize), 0)
                if strides is None:
                    strides = np.empty(shape, dtype, order).strides  # type: ignore[call-overload]
                ends = [(n - 1) * s for n, s in zip(shape, strides)] if prod(shape) else []
                before, after = -sum(x for x in ends if x < 0), sum(x for x in ends if x > 0) + dtype.itemsize
                memory = (ctypes.c_byte * (before + after)).from_address(memptr.ptr - before)
                self.memory = memptr.mem  # this array keeps the memory alive
                x = np.ndarray(shape, dtype, memory, before, strides)  # type: ignore[arg-type]
                super().__init__(x, simulated)

            @property
            def data(self) -> Any:
                return SimpleNamespace(ptr=self.x.__array_interface__["data"][0], mem=self.memory)

            def get(self, stream: Any = None, order: str = "C") -> np.ndarray:
                simulated.streams[-1].synchronize()
                simulated.gpu.downloads.append(self.nbytes)
                return np.array(self.x, order=order)  # type: ignore[call-overload]

            def set(self, x: np.ndarray) -> None:
                assert x.dtype == self.dtype and x.shape == self.shape and self.flags.forc
                assert x.flags.f_contiguous if self.flags.f_contiguous else x.flags.c_contiguous
                simulated.gpu.uploads.append(self.nbytes)
                self.x[...] = x

        ndarray.__module__ = "cupy"
        self.ndarray = ndarray

    # methods of the device of FakeArrays
    def _launch(self, what: str, reads: Sequence[Any], writes: Sequence[Any], act: Any) -> None:
        assert all(isinstance(x, FakeArray) for x in (*reads, *writes)), f"{what} of an array of the host"
        act()

    def empty(self, shape: Sequence[int], dtype: Any = float, order: str = "C") -> Any:
        made = self.ndarray(shape, dtype, order=order)
        if made.size:
            ctypes.memset(made.data.ptr, 0xFF, made.nbytes)  # NaN: reads of unwritten memory are seen
        return made

    def to_host(self, x: Any) -> np.ndarray:
        return np.array(x.x)

    # functions of the module cupy
    def ones(self, shape: Sequence[int], dtype: Any = float) -> Any:
        made = self.empty(shape, dtype)
        made.x[...] = 1
        return made

    def asarray(self, x: np.ndarray) -> Any:
        self.gpu.uploads.append(x.nbytes)
        made = self.empty(x.shape, x.dtype)
        made.x[...] = x
        return made

    def from_dlpack(self, x: Any) -> Any:
        if x.__dlpack_device__()[0] == 2:
            x.__dlpack__()
        raise BufferError("an array of the host")

    def as_strided(self, x: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return x._like(np.lib.stride_tricks.as_strided(x.x, shape, strides))

    @contextmanager
    def using_allocator(self, allocator: str | None) -> Iterator[None]:
        self.pool.managed = allocator == "managed"
        try:
            yield
        finally:
            self.pool.managed = False

    def get_elapsed_time(self, begin: Event, end: Event) -> float:
        assert begin.number <= end.number
        return 1e-3 * (end.number - begin.number)

    def modules(self) -> dict[str, ModuleType]:
        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cupy.__spec__ = ModuleSpec("cupy", None)  # for importlib.util.find_spec
        vars(cupy).update(
            __version__="14.2.0",
            ndarray=self.ndarray,
            empty=self.empty,
            ones=self.ones,
            asarray=self.asarray,
            from_dlpack=self.from_dlpack,
            get_default_memory_pool=lambda: self.pool,
            ElementwiseKernel=partial(ElementwiseKernel, self.gpu),
            lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=self.as_strided)),
            cuda=cuda,
        )
        vars(cuda).update(
            runtime=self.gpu,
            cublas=self.gpu,
            cusolver=Cusolver(self),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            nccl=Nccl,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            MemoryPointer=MemoryPointer,
            UnownedMemory=Unowned,
            PinnedMemory=self.gpu.pinned,
            PinnedMemoryPointer=lambda memory, offset: memory,
            malloc_managed="managed",
            using_allocator=self.using_allocator,
            Event=Event,
            Stream=lambda non_blocking, priority=0: Stream(self),
            get_current_stream=lambda: self.streams[-1],
            get_elapsed_time=self.get_elapsed_time,
        )
        return {"cupy": cupy, "cupy.cuda": cuda}


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Event:
    _numbers = count()

    def __init__(self) -> None:
        self.number = self.ptr = next(self._numbers)
        if Nccl.waiting:
            Nccl.behind.add(self.ptr)

    def synchronize(self) -> None:
        while self.ptr in Nccl.behind and Nccl.waiting:
            sleep(1e-3)


class Stream:
    def __init__(self, simulated: Simulated) -> None:
        self._simulated, self.ptr = simulated, next(self._numbers)  # another address for each stream

    _numbers = count()

    def record(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> Stream:
        self._simulated.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._simulated.streams.pop() is self


class ElementwiseKernel:
    """A kernel, whose C source is translated to Python and applied to whole arrays."""

    def __init__(
        self, gpu: Gpu, in_params: str, out_params: str, operation: str, name: str, options: tuple[str, ...] = ()
    ) -> None:
        assert name != "pdgemm_normal" or "--fmad=false" in options, "CUDA would round otherwise than the host"
        self._gpu = gpu
        self._in, self._out = ([tuple(x.rsplit(" ", 1)) for x in p.split(", ")] for p in (in_params, out_params))
        self._operation = _in_python(operation)

    def __call__(self, *args: Any, size: int | None = None) -> None:
        names: dict[str, Any] = {
            "cast": _cast,
            "conj": np.conj,
            "where": np.where,
            **{name: getattr(np, name) for name in ("sqrt", "exp", "tanh")},
            "erfc": erfc,
        }
        names["__double_as_longlong"] = lambda x: x.view(np.int64)
        names["__longlong_as_double"] = lambda x: x.view(np.float64)
        assert len(args) == len(self._in) + len(self._out)
        for (kind, name), x in zip(self._in + self._out, args):
            declared = kind.removeprefix("raw ")
            names[declared] = x.dtype.type
            if len(declared) > 1:  # a type, not a placeholder such as T
                assert np.dtype(declared) == x.dtype, f"{name} is {x.dtype}, declared as {kind}"
            names[name] = x.x.view() if isinstance(x, FakeArray) else x
        targets = args[len(self._in) :]
        (kind, _), target = self._out[0], targets[0]
        for x in (x for x in args[: len(self._in)] if isinstance(x, FakeArray)):
            self._gpu.passed(target.data.ptr, x.data.ptr, target.nbytes)
        if size is None:
            steps = [s for n, s in zip(target.shape, target.strides) if n > 1]
            assert steps == sorted(steps, reverse=True), "neighbouring threads do not write neighbouring elements"
        if size is not None:
            assert kind.startswith("raw ")
            names["i"] = np.arange(size)
        with np.errstate(all="ignore"):
            exec(self._operation, names)
            if size is None:
                for (_, name), target in zip(self._out, targets):
                    assert names[name].dtype == target.dtype
                    assert names[name].shape in (target.shape, ()), "a kernel that broadcasts its result"
                    target.x[...] = names[name]


def _cast(name: str, x: Any) -> np.ndarray:
    return np.asarray(x).astype(_TYPES[name])


def _in_python(operation: str) -> str:
    lines = []
    for statement in operation.split("; "):
        text = re.sub(r"static_cast<(complex<\w+>|[\w ]+)>\(", r'cast("\1", ', statement).replace(".real()", ".real")
        text = re.sub(r"\bfrom\b", "origin", text).replace("[] =", " =").replace("{", "(").replace("}", ")")
        text = re.sub(r"\b(0x[0-9A-F]+)ULL\b", r"\1", re.sub(r"^(unsigned long long|long long|double|R) ", "", text))
        text = re.sub(r"^if \((.+?)\) (\S+) = (.+)", r"\2 = where(\1, \3, \2)", text)
        if text.startswith("ptrdiff_t "):
            text = text.removeprefix("ptrdiff_t ").replace(" / ", " // ")
            text = re.sub(r", (\w+) +=", r"; \1 =", text)
        lines.append(text)
    return "; ".join(lines)


@contextmanager
def fake_cupy(gpus: int = 1, aware: str = "no") -> Iterator[Gpu]:
    """Let `import cupy` load this simulation, with `gpus` GPUs.   aware : is MPI CUDA-aware?"""
    from pdgemm import devices
    from pdgemm.devices import gpu_aware_mpi, gpu_binding as choice
    from pdgemm.local.arrays import device

    gpu = Gpu(gpus)
    simulated = Simulated(gpu)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"stuck": False, "error": "", "waiting": set()}.items():
            patch.setattr(Nccl, name, value)
        for name, module in simulated.modules().items():
            patch.setitem(sys.modules, name, module)
        for name in MODULES:  # they are imported again
            patch.delitem(sys.modules, f"pdgemm.devices.{name}", raising=False)
            patch.delattr(devices, name, raising=False)
        patch.setattr(device, "_devices", dict(device._devices))
        patch.setattr(choice, "driver", lambda: gpu)
        patch.setattr(gpu_aware_mpi, "support_reported", lambda: aware)
        patch.setattr(gpu_aware_mpi, "_SIDE", 16)
        choice.visible.cache_clear()
        from pdgemm.devices import grouped_gemm

        patch.setattr(grouped_gemm, "_library", {13: gpu}.get)
        try:
            yield gpu
        finally:
            choice.visible.cache_clear()
            for name in MODULES:
                sys.modules.pop(f"pdgemm.devices.{name}", None)
                vars(devices).pop(name, None)
