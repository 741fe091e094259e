"""How ranks may reach what others have on a device, in tests of the fake one (fake_device.py)."""

from __future__ import annotations

from pdgemm.local.arrays.device import Reach

WAYS = {  # how ranks reach each other, and the mover that is asked for
    "shared": (Reach("shared", staged=False), "auto"),
    "ipc": (Reach("ipc", staged=True), "auto"),
    "ring": (Reach("", staged=False), "ring"),
    "ibcast": (Reach("shared", staged=False), "ibcast"),
    "staged": (Reach("", staged=True), "auto"),
    "nccl": (Reach("", staged=True, nccl=True), "auto"),
}
WAYS_OF_PANELS = {  # of factorisations
    "read": Reach("shared", staged=False),
    "sent": Reach("", staged=False),
    "read alone": Reach("shared", staged=True),  # MPI takes no memory of the device
}
