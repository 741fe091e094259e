"""The assignment of GPUs to ranks, and errors without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import jobs
import pytest
from fake_cuda import Gpu
from tiers import thorough

from pdgemm.devices import gpu_aware_mpi, gpu_binding
from pdgemm.devices.gpu_binding import nearest, share, visible


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_ranks_share_gpus_evenly_and_neighbours_share_one(ranks: int, gpus: int) -> None:
    found = [share(rank, ranks, gpus) for rank in range(ranks)]
    assert found == sorted(found)
    counts = [found.count(gpu) for gpu in range(gpus)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == ranks
    assert [share(rank, 0, gpus) for rank in range(ranks)] == [rank % gpus for rank in range(ranks)]


def test_a_rank_uses_the_gpu_next_to_its_processors() -> None:
    one_each, two_each = [{0, 1}, {2, 3}], [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    assert [nearest(number, one_each, {2}) for number in (0, 1)] == [1, 1]
    assert nearest(0, one_each, {1, 2}) == 0  # a rank that is not bound to one side
    assert nearest(0, one_each, {7}) == 0
    assert nearest(0, [set(), set()], {2}) == 0  # the system does not say which processors are near
    assert nearest(3, two_each, {2}) == 3
    with pytest.warns(RuntimeWarning, match=r"GPU 1 is not next to this rank's processors, \[2, 3\] are"):
        assert nearest(1, two_each, {2}) == 1


def test_the_system_tells_which_processors_are_next_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    monkeypatch.setattr(gpu_binding, "PCI", tmp_path)
    monkeypatch.setattr(gpu_binding, "driver", lambda: Gpu(2))
    assert gpu_binding._processors(1) == {0, 1, 2, 8, 10, 11}
    assert gpu_binding._processors(0) == set()


def test_missing_parts_of_gpu_direct_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path() -> str:
        return gpu_aware_mpi.path_between_nodes(True, tmp_path)

    def write(name: str, text: str = "") -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    assert "Open MPI sends by ob1" in path()
    monkeypatch.delenv("OMPI_MCA_pml")
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert gpu_aware_mpi.path_between_nodes(False, tmp_path).startswith("staged in pinned memory")
    assert all(x in path() for x in ("no RDMA adapter", "UCX is not loaded", "nvidia_peermem"))
    write("proc/self/maps", "7f00-7f01 r-xp /usr/lib/libucp.so.0\n")
    write("sys/class/infiniband/mlx5_0")
    assert (
        path() == "copied through the host by MPI; for GPUDirect RDMA it lacks: neither the module nvidia_peermem nor "
        "NVIDIA's open kernel modules (dmabuf)"
    )
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95\n")
    assert path() == "by GPUDirect RDMA (dmabuf and UCX are here)"
    write("sys/module/nvidia_peermem/refcnt")
    assert "nvidia_peermem and UCX" in path()
    monkeypatch.setenv("UCX_TLS", "rc,sm")
    assert "UCX_TLS=rc,sm has no cuda_copy" in path()


def run(code: str) -> str:
    done = jobs.run(jobs.python(0, "-c", code))
    assert not done.returncode, done.stderr
    return done.stdout.strip()


PRODUCT = """
import sys
{first}
from mpi4py import MPI
from pdgemm import DistMatrix, PdgemmError, ProcessGrid, pdgemm
grid = ProcessGrid(MPI.COMM_WORLD)
A = DistMatrix.eye(20, grid=grid)
print(pdgemm(1, A, A).norm(1), "cupy" in sys.modules)
{then}
try:
    A.to_device("cuda")
except PdgemmError as error:
    print(type(error).__name__, error)
"""


def test_the_host_needs_no_cupy() -> None:
    """A product on the host does not load CuPy; a device without CuPy is an error that says how to install it."""
    out = run(PRODUCT.format(first="", then="sys.modules['cupy'] = None")).split("\n")
    assert out[0] == "1.0 False"
    assert out[1].startswith("DeviceError device 'cuda' needs CuPy")
    assert "pip install 'cupy-cuda13x[ctk]'" in out[1]


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy_without_a_gpu_is_a_one_line_error() -> None:
    if visible():
        pytest.skip("there is a GPU")
    out = run(PRODUCT.format(first="import cupy", then="")).split("\n")
    assert out[0] == "1.0 True"
    assert out[1].startswith("DeviceError no GPU can be used: ")


@pytest.mark.parametrize("options", [["--device", "cuda"], pytest.param(["--device=cuda"], marks=thorough)])
def test_the_command_line_chooses_before_mpi_starts(options: list[str]) -> None:
    """A GPU is chosen before MPI starts; an error of one rank is raised on all ranks with the first matrix."""
    code = f"""
import sys
from pdgemm.tools.cli import commands as cli
from pdgemm.devices import gpu_binding as gpus
from pdgemm.errors import DeviceError
def choose():
    print("mpi4py.MPI" in sys.modules)
    raise DeviceError("busy")
gpus.choose = choose
sys.argv = ["pdgemm", "multiply", "nothing.h5:/x", "b.h5:/x", "-o", "c.h5:/x", *{options}]
cli.main()
"""
    done = jobs.run(jobs.python(0, "-c", code))
    assert done.stdout.split()[0] == "False"
    assert done.returncode == 2 and done.stderr.startswith("pdgemm: error: ")
