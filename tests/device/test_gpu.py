"""On a real GPU: kernels, cuBLAS, every mover, memory.  Skipped without a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from cuda_layer import CudaLayer

from pdgemm.devices import gpu_binding

REASON = "CuPy is not installed" if find_spec("cupy") is None else "" if gpu_binding.visible() else "there is no GPU"
pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.skipif(REASON != "", reason=REASON or "there is one")]
pytestmark += [pytest.mark.timeout(400)]  # a new machine compiles each kernel at its first use


class TestGpu(CudaLayer):
    """The tests for a GPU (cuda_layer.py), on a real one."""
