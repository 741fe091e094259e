"""Training takes arrays of the host, and says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_device import fake_device

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import empty
from pdgemm.parallel import Buckets, Mesh
from pdgemm.parallel.layers import Linear

pytestmark = pytest.mark.mpi


def test_parameters_on_a_device_are_refused(comm: Any) -> None:
    with fake_device() as device, Mesh(comm.Dup(), dp=-1) as mesh:
        w = empty((3, 2), np.dtype("f"), device=device)
        with pytest.raises(ArgumentError, match="parameter .w. is on a device, fake; training takes arrays of the"):
            Buckets(mesh, {"w": w})


def test_activations_on_a_device_are_refused(comm: Any) -> None:
    with fake_device() as device, Mesh(comm.Dup(), dp=-1) as mesh:
        layer, x = Linear(mesh, 3, 2), empty((4, 3), np.dtype("f"), device=device)
        with pytest.raises(ArgumentError, match="x is on a device, fake; training takes arrays of the host"):
            layer.forward(x, np.zeros((3, 2), "f"))
