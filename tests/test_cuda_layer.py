"""pdgemm.cuda and pdgemm.cuda_reach themselves, on CuPy without a GPU (fake_cupy.py), by the tests for a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_gpu
from fake_cupy import Gpu, fake_cupy
from test_gpu import (  # noqa: F401
    cuda,
    movers,
    test_batches,
    test_combine,
    test_every_mover,
    test_managed_memory_is_staged,
    test_matrices,
    test_memory,
    test_sixteen_bits_and_whole_numbers,
    test_too_much_is_asked_for,
)

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True, params=["one GPU", "a GPU each, and MPI takes pointers"])
def gpu(comm: Any, request: Any, monkeypatch: Any) -> Iterator[Gpu]:
    if comm.size > 4:
        pytest.skip("runs on up to 4 ranks: nothing in this layer depends on their number")
    monkeypatch.setattr(test_gpu, "OPS", ["NN", "TC", "CN", "NT"])
    alone = request.param == "one GPU"
    with fake_cupy(1 if alone else comm.size, aware="no" if alone else "yes") as made:
        yield made
