"""Find out whether the MPI library accepts pointers to device memory: the library is queried, and then tested.

A library that wrongly reports support crashes or corrupts data.  So messages are sent from device memory, and checked,
only if the library reports support or a child process has sent such messages.  PDGEMM_GPU_AWARE=yes or no skips both
steps.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import Device, device_named, to_host
from pdgemm.support import launcher
from pdgemm.support.agreement import together
from pdgemm.support.waits import Wait

SIZES = (1, 1 << 10, 1 << 16, 1 << 20)  # words of 8 bytes
_SIDE, _PRODUCTS = 1024, 20  # order and number of the products that run during a message, for a millisecond
_PML = "OMPI_MCA_pml"  # how Open MPI sends messages: "ucx", or "ob1" by shared memory and TCP
_PATIENCE = 30  # seconds until the child process is ended


def support_reported() -> str:
    """Return the support for GPUs that the MPI library reports: "yes", "no" or "unknown"."""
    try:
        return "yes" if ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support() else "no"
    except (AttributeError, OSError):
        pass
    if "Open MPI" not in MPI.Get_library_version():  # Open MPI repeats the info that the launcher requested
        info = MPI.COMM_WORLD.Get_info()
        kinds = info.Get("mpi_memory_alloc_kinds") or ""
        info.Free()
        if "cuda" in kinds:
            return "yes"
    return "unknown"


def gpu_aware(comm: MPI.Intracomm, device: Device) -> tuple[bool, str]:
    """Return whether MPI accepts pointers to device memory, and the evidence for it.  Collective over comm."""
    setting = yes_or_no("PDGEMM_GPU_AWARE", comm)
    aware, why = comm.bcast(_before_trying(setting) if comm.rank == 0 else None)
    if not aware or setting:
        return aware, why
    wrong = comm.allgather(self_test(comm, device))
    bad = [(rank, text) for rank, text in enumerate(wrong) if text]
    if bad:
        return False, f"its self-test failed on rank {bad[0][0]}: {bad[0][1]}"
    return True, "its self-test passed"


def yes_or_no(variable: str, comm: MPI.Intracomm) -> bool | None:
    """Return an environment variable, equal on all ranks, as a bool; None if it is not set.  Collective over comm."""
    with together(comm) as description:
        said = os.environ.get(variable, "").lower()
        if said not in ("", "yes", "1", "no", "0"):
            raise ArgumentError(f"{variable} must be yes or no, got {said[:100]!r}")
        description += [variable, said]
    return said in ("yes", "1") if said else None


def path_between_nodes(aware: bool, root: Path = Path("/")) -> str:
    """Return the path of messages from GPU memory to other nodes, and the missing parts of GPUDirect RDMA.  Local.

    aware : MPI accepts pointers to device memory.   root : where the file systems /proc and /sys are.
    GPUDirect RDMA needs an adapter, UCX in this process, and either the driver's module nvidia_peermem or dmabuf, which
    comes with Linux 5.12 and NVIDIA's open kernel modules.  `UCX_PROTO_INFO=y` prints, for each message size, whether
    UCX uses it.
    """
    if not aware:
        return "staged in pinned memory of the host, because MPI takes no pointers to GPU memory"
    lacking, transports = [], os.environ.get("UCX_TLS", "all")
    if not (root / "sys/class/infiniband").exists():
        lacking.append("no RDMA adapter (/sys/class/infiniband)")
    if (pml := os.environ.get(_PML, "ucx")) != "ucx":
        lacking.append(f"Open MPI sends by {pml} ({_PML}), which does not use UCX")
    elif "libucp" not in _text(root / "proc/self/maps"):
        lacking.append("UCX is not loaded (Open MPI: OMPI_MCA_pml=ucx)")
    elif not any(name in transports for name in ("all", "cuda")):
        lacking.append(f"UCX_TLS={transports} has no cuda_copy")
    peermem = any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
    dmabuf = "Open Kernel Module" in _text(root / "proc/driver/nvidia/version")
    if not (peermem or dmabuf):
        lacking.append("neither the module nvidia_peermem nor NVIDIA's open kernel modules (dmabuf)")
    if lacking:
        return f"copied through the host by MPI; for GPUDirect RDMA it lacks: {'; '.join(lacking)}"
    return f"by GPUDirect RDMA ({'nvidia_peermem' if peermem else 'dmabuf'} and UCX are here)"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _before_trying(setting: bool | None) -> tuple[bool, str]:
    """Return whether MPI may accept pointers to device memory, and why.

    The answer is the user's setting.  Without a setting, it is whether the self-test is safe.
    """
    if setting is not None:
        return setting, f"PDGEMM_GPU_AWARE={'yes' if setting else 'no'}"
    reported = support_reported()
    if reported == "no":
        return False, "the MPI library reports no support for GPUs"
    if reported == "unknown" and not _child_survives():
        why = "the MPI library does not report whether it supports GPUs, and a child process that tried it failed"
        return False, why
    return True, ""


def self_test(comm: MPI.Intracomm, device: Device) -> str:
    """Send to the next rank and broadcast, 8 B to 8 MiB, while products run; return this rank's error, or "".

    Collective over comm.
    """
    after, before, lacking = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, ""
    messages = {
        words: [np.arange(words, dtype=np.int64) * 3 + 7 * rank for rank in (comm.rank, before)] for words in SIZES
    }
    try:
        x, y, z = (device.empty((_SIDE, _SIDE), np.float32) for _ in range(3))
        multiply = device.multiply(1, x, y, z, False, False, tf32=False)
        with device.transfer_stream:
            buffers = [[device.to_device(x, "C") for x in (mine, 0 * mine)] for mine, _ in messages.values()]
    except (MemoryError, RuntimeError) as bad:  # also errors of CUDA
        lacking = f"its arrays cannot be allocated: {bad}"
    if comm.allreduce(bool(lacking), MPI.LOR):  # before any rank waits for a message
        return lacking
    for (words, (_, theirs)), (sent, got) in zip(messages.items(), buffers):
        with device.product_stream:
            for _ in range(_PRODUCTS):
                multiply(0)
        got_it = comm.Irecv(got, source=before)
        with Wait(comm):
            comm.Isend(sent, dest=after).Wait()
            got_it.Wait()
        wrong = [] if np.array_equal(to_host(got), theirs) else [f"{8 * words} bytes arrived changed"]
        with Wait(comm):
            comm.Ibcast(sent, root=0).Wait()
        if not np.array_equal(to_host(sent), np.arange(words, dtype=np.int64) * 3):
            wrong.append(f"{8 * words} bytes were broadcast changed")
        device.product_stream.synchronize()
        if comm.allreduce(bool(wrong), MPI.LOR):
            return wrong[0] if wrong else ""
    return ""


def _child_survives() -> bool:
    """Return whether a child process of one rank passes the self-test."""
    try:
        command = [sys.executable, "-m", "pdgemm.devices.gpu_aware_mpi"]
        done = subprocess.run(command, env=launcher.outside_allocation(), timeout=_PATIENCE, capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _try(name: str) -> Any:
    device = device_named(name)
    assert device is not None
    return self_test(MPI.COMM_SELF, device)


if __name__ == "__main__":
    sys.exit(_try("cuda") or 0)
