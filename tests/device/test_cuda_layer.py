"""`pdgemm.devices` itself, on CuPy without a GPU (fake_cupy.py), by the tests for a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_gpu
from fake_cupy import CUDARuntimeError, Gpu, Nccl, fake_cupy
from test_gpu import (  # noqa: F401
    cuda,
    movers,
    test_a_product_keeps_its_operands,
    test_batches,
    test_combine,
    test_every_mover,
    test_managed_memory_is_staged,
    test_matrices,
    test_memory,
    test_sixteen_bits_and_whole_numbers,
    test_too_much_is_asked_for,
)
from tiers import everything

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True, params=["one GPU", "a GPU each, and MPI takes pointers"])
def gpu(comm: Any, request: Any, monkeypatch: Any) -> Iterator[Gpu]:
    if comm.size > 4:
        pytest.skip("runs on up to 4 ranks: nothing in this layer depends on their number")
    monkeypatch.setattr(test_gpu, "OPS", ["NN", "TC", "CN", "NT"] if everything() else ["TC", "CN"])
    alone = request.param == "one GPU"
    with fake_cupy(1 if alone else comm.size, aware="no" if alone else "yes") as made:
        yield made


def test_what_ranks_find_out(comm: Any, gpu: Gpu, cuda: Any) -> None:  # noqa: F811
    """How ranks reach each other is what this machine has, and it is how they do."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm

    alone = gpu.count == 1
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.random((40, 40), grid=grid, seed=s, device="cuda") for s in (1, 2))
        reach = cuda.reach(grid)
        assert reach.sharing == (comm.size if alone else 1)
        if comm.size == 1:
            return
        assert (reach.reads, reach.staged, reach.nccl) == ("shared" if alone else "ipc", alone, not alone)
        assert reach.why == ("the MPI library reports no support for GPUs" if alone else "its self-test passed")
        assert "ipcOpenMemHandle" in gpu.calls
        gpu.calls.clear()
        C = pdgemm(1, A, B)
        assert C.report.mover == reach.reads
        assert C.report.ranks_per_device == reach.sharing
        assert not C.report.counted.messages_sent
        assert "gemmEx" in gpu.calls
        assert gpu.mapped
        del C  # and what it remembers of its last product
        assert not gpu.mapped
        gpu.calls.clear()
        pdgemm(1, A, B, mover="staged")
        assert "memcpyAsync" in gpu.calls or grid.shape == (1, 1)


@pytest.mark.on_ranks(1, 2)
def test_benchmark(comm: Any, gpu: Gpu, capsys: Any, monkeypatch: Any) -> None:
    """scripts/bench_gpu.py as its ranks run it: all movers that there are, and every figure is there."""
    if comm.size > 2:
        pytest.skip("runs on one rank and on two")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    bench: Any = import_module("bench_gpu")
    monkeypatch.setattr(bench, "PANEL_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "MANY", 100)
    monkeypatch.setattr(bench, "DTYPES", ("int8", "bfloat16", "complex64"))
    bench.worker([40], 1, 3, "cuda")
    if comm.rank:
        return
    found = json.loads(capsys.readouterr().out)
    assert all(x["right"] and x["as_predicted"] for x in found["correct"])
    if comm.size > 1:
        more = [] if gpu.count == 1 else ["mpi", "ring", "ibcast", "nccl"]
        assert {x["mover"] for x in found["products"]} == {"shared", "ipc", "staged", *more}
    assert found["hardware"]["gpu"] == "simulated"
    assert found["memory"]["left_bytes"] == 0
    bench.show([found])
    assert "simulated" in capsys.readouterr().out


def test_no_gpu(comm: Any, gpu: Gpu) -> None:
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.errors import DeviceError

    gpu.count = 0
    with ProcessGrid(comm) as grid, pytest.raises(DeviceError, match="no GPU is visible to this process"):
        DistMatrix.zeros((3, 3), grid=grid, device="cuda")


def test_what_fails_is_told(comm: Any, gpu: Gpu, cuda: Any) -> None:  # noqa: F811
    """A kernel that failed, memory that cannot be exported or pinned, an address that no kernel takes."""
    import cupy

    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.errors import DeviceError, OutOfMemoryError

    event = cuda.current_stream().record()
    gpu.failed = 600
    assert not cuda.happened(event)
    gpu.failed = 700
    with pytest.raises(CUDARuntimeError, match="700"):
        cuda.happened(event)
    gpu.failed = 0
    assert cuda.happened(event)

    with pytest.raises(OutOfMemoryError, match="bytes of pinned memory"):
        cuda.pinned(1 << 40, "float64")
    with ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.random((40, 40), grid=grid, seed=s, device="cuda") for s in (1, 2, 3))
        allocator = cupy.cuda.malloc_managed if comm.rank == comm.size - 1 else None  # on one rank only
        with cupy.cuda.using_allocator(allocator):
            for check in (True, False) if comm.size > 1 else ():
                with pytest.raises(DeviceError, match="CuPy's allocator now returns managed memory"):
                    pdgemm(1, A, B, 0, C, algorithm="inner", check=check)
        bytes_ = cuda.to_device(np.zeros(8 * 40 * 40 + 8, np.int8), "C")
        shape = A.local.shape
        askew = bytes_[4 : 4 + 8 * shape[0] * shape[1]].view("float64").reshape(shape)
        with pytest.raises(DeviceError, match="which is not a multiple of 8 bytes"):
            DistMatrix.from_local(askew, (40, 40), grid=grid)


def test_nccl_is_tried(comm: Any, gpu: Gpu, cuda: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Where it would be chosen; where it fails on one rank, others do."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.devices import cuda_ipc

    if gpu.count == 1:
        pytest.skip("the ranks share a GPU")
    monkeypatch.setattr(cuda_ipc, "_maps", lambda memory, device: False)
    making, sending = (Nccl, "NcclCommunicator"), (Nccl.NcclCommunicator, "bcast")
    for fails in (None, making, sending):
        with monkeypatch.context() as patch, ProcessGrid(comm) as grid:
            if fails and comm.rank == comm.size - 1:
                patch.setattr(*fails, failing(getattr(*fails)))
            A = DistMatrix.random((40, 40), grid=grid, device="cuda")
            reach = cuda.reach(grid)
            assert reach.nccl == (not fails or comm.size == 1)
            moved = pdgemm(1, A, A, algorithm="summa").report.mover
            assert comm.size == 1 or (moved == "nccl") == (not fails)


def failing(call: Any) -> Any:
    """What others do with it goes well."""

    def failed(*args: Any) -> None:
        call(*args)
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    return failed
