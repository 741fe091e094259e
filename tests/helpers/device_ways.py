"""The ways in which ranks access each other's device memory, in tests of the fake device (fake_device.py)."""

from __future__ import annotations

from pdgemm.local.arrays.device import Reach

WAYS = {  # by name: how ranks access each other's memory, and the requested mover
    "shared": (Reach("shared", staged=False), "auto"),
    "ipc": (Reach("ipc", staged=True), "auto"),
    "ring": (Reach("", staged=False), "ring"),
    "ibcast": (Reach("shared", staged=False), "ibcast"),
    "staged": (Reach("", staged=True), "auto"),
    "nccl": (Reach("", staged=True, nccl=True), "auto"),
}
WAYS_OF_PANELS = {  # by name: how ranks access each other's memory in factorisations
    "read": Reach("shared", staged=False),
    "sent": Reach("", staged=False),
    "read alone": Reach("shared", staged=True),  # not CUDA-aware: MPI cannot send device memory
}
