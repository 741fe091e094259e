"""Energy counters of a node: RAPL for processors and their memory, NVML for NVIDIA's GPUs.

A counter covers a whole socket or GPU, other processes included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

POWERCAP = Path("/sys/class/powercap")  # the kernel's interface to RAPL, for Intel's and AMD's processors


class Counter(NamedTuple):
    """A counter of joules, which wraps around at `wraps`; 0 if it never wraps around."""

    name: str
    read: Callable[[], float]
    wraps: float = 0.0


class Meter:
    """A meter of the joules of this node since its creation.  One rank per node has a meter.

    absent : the counters that cannot be read, and why; "" if all can be.
    """

    def __init__(self, gpus: bool, powercap: Path = POWERCAP) -> None:
        self._counters, self.absent = _rapl(powercap)
        if gpus:
            more, absent = _nvml()
            self._counters = self._counters + more
            self.absent = "; ".join(x for x in (self.absent, absent) if x)
        self._before = [counter.read() for counter in self._counters]

    @property
    def names(self) -> list[str]:
        return [counter.name for counter in self._counters]

    def joules(self) -> float:
        """Return the joules used so far; a counter may have wrapped around once, which takes minutes."""
        used = 0.0
        for counter, before in zip(self._counters, self._before):
            more = counter.read() - before
            used += more + counter.wraps if more < 0 else more
        return used


def _rapl(powercap: Path) -> tuple[list[Counter], str]:
    """Return the counters of packages, and of memory outside them; or none, and the reason."""
    zones = [
        zone
        for zone in sorted(powercap.glob("intel-rapl:*"))
        if zone.name.count(":") == 1 or _text(zone / "name") == "dram"
    ]
    packages = [zone for zone in zones if _text(zone / "name") != "psys"]  # psys includes the packages
    if not packages:
        return [], "no RAPL counters"
    try:
        counters = [
            Counter(f"RAPL {_text(x / 'name')}", partial(_joules, x / "energy_uj"), _joules(x / "max_energy_range_uj"))
            for x in packages
        ]
        for counter in counters:
            counter.read()
    except PermissionError:
        return [], "RAPL counters are readable by root only"
    except (OSError, ValueError) as bad:
        return [], f"RAPL counters cannot be read ({bad})"
    return counters, ""


def _nvml() -> tuple[list[Counter], str]:
    """Return the counters of all GPUs that the driver shows; or none, and the reason."""
    if find_spec("pynvml") is None:
        return [], "no NVML: pip install nvidia-ml-py"
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        counters = [Counter(f"GPU {number}", partial(_of_gpu, nvml, handle)) for number, handle in enumerate(handles)]
        for counter in counters:
            counter.read()
    except nvml.NVMLError as bad:
        return [], f"NVML cannot be read ({bad})"
    return counters, "" if counters else "NVML shows no GPU"


def _joules(path: Path) -> float:
    """Return the joules of a file that holds microjoules."""
    return int(path.read_text()) / 1e6


def _of_gpu(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
