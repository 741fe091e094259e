"""torch_buckets.py: gradients of torch in the memory of buckets, and DistributedDataParallel beside it where torch is.

Without torch a stand-in shows what the example rests on: arrays that keep their places, and hooks that reduce them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from example_programs import example
from mpi4py import MPI

from pdgemm.errors import ArgumentError
from pdgemm.parallel import SGD, Buckets, Mesh, ShardedOptimizer

pytestmark = pytest.mark.mpi
SHAPES = {"w1": (5, 7), "b1": (7,), "w2": (7, 3)}


@pytest.fixture
def mesh(comm: Any) -> Iterator[Any]:
    with Mesh(comm.Dup(), dp=-1) as mesh:
        yield mesh


class Tensor:
    """Memory of another library, which comes and goes by DLPack."""

    def __init__(self, source: Any) -> None:
        self.array = np.from_dlpack(source)

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    detach = property(lambda self: lambda: self)


class Parameter:
    """A parameter as torch has it, which calls its hook when a gradient has been added."""

    def __init__(self, value: np.ndarray) -> None:
        self.data, self.grad, self.requires_grad, self.hook = Tensor(value), None, True, None

    def detach(self) -> Tensor:
        return self.data

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def backward(self, gradient: np.ndarray) -> None:
        if self.grad is None:
            self.grad = Tensor(gradient.copy())
        else:
            self.grad.array[...] += gradient
        self.hook(self)


def begun(mesh: Any) -> bool:
    """Has a reduction of gradients begun, which may have ended?"""
    return bool(mesh.shape.size == 1 or mesh.transfers.in_flight or mesh.traffic["gradients"].words_received)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_library_adds_to_the_gradients_of_buckets(mesh: Any, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by a stand-in are those of NumPy's gradients; also where a gradient was set to None meanwhile."""
    module = example("torch_buckets")
    monkeypatch.setattr(module, "torch", SimpleNamespace(from_dlpack=Tensor))
    initial = {name: np.full(shape, 0.5) for name, shape in SHAPES.items()}
    model = {name: Parameter(value.copy()) for name, value in initial.items()} | {"frozen": Parameter(np.ones(3))}
    model["frozen"].requires_grad = False
    ours = module.shared_buckets(mesh, SimpleNamespace(named_parameters=model.items), stage=stage, bucket_bytes=100)
    theirs = Buckets(mesh, initial, stage=stage, bucket_bytes=100)
    optimizers = [ShardedOptimizer(x, SGD(momentum=0.9)) for x in (ours, theirs)]
    del model["frozen"]
    for step in range(4):
        for name in reversed(SHAPES):
            gradient = np.random.default_rng([step, mesh.rank]).random(SHAPES[name])
            if step == 2 and name == "b1":
                model[name].grad = None  # as zero_grad() does
            model[name].backward(gradient)
            assert model[name].grad.data_ptr() == ours.gradients[name].ctypes.data
            theirs.gradients[name] += gradient
            theirs.ready(name)
        assert begun(mesh)
        assert len({optimizer.step(0.1).norm for optimizer in optimizers}) == 1
        for name, p in model.items():
            assert np.array_equal(theirs.parameters[name], ours.parameters[name])
            assert np.array_equal(p.data.array, ours.parameters[name]) and not p.grad.array.any()


def test_without_torch_it_says_so(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one error of the package, and so with exit code 2; and which stages it takes."""
    module = example("torch_buckets")
    with pytest.raises(ArgumentError, match="with stages 0 and 1, got stage 2"):
        module.shared_buckets(None, None, stage=2)
    monkeypatch.setattr(module, "torch", None)
    with pytest.raises(ArgumentError, match="torch is not installed: pip install torch"):
        module.main()


def test_steps_are_those_of_distributed_data_parallel(mesh: Any) -> None:
    """In float64, 8 steps on gloo: losses and parameters to rounding, and those of one process."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    import torch

    module, rng = example("torch_buckets"), np.random.default_rng(3)
    x, labels = torch.from_numpy(rng.random((40, 1, 8, 8))), torch.from_numpy(rng.integers(0, 10, 40))
    for zero in (0, 1):
        options = module.parsed(["--steps", "8", "--batch", "20", "--zero", str(zero)])  # 3 ranks divide it unevenly
        model, losses = module.by_buckets(options, mesh, x, labels)
        other, others = module.by_ddp(options, mesh, x, labels)
        with Mesh(MPI.COMM_SELF) as alone:
            one, of_one = module.by_buckets(options, alone, x, labels)
        np.testing.assert_allclose(losses, others, rtol=1e-13)
        np.testing.assert_allclose(losses, of_one, rtol=1e-13)
        for p, q, r in zip(model.parameters(), other.parameters(), one.parameters()):
            np.testing.assert_allclose(p.detach().numpy(), q.detach().numpy(), rtol=0, atol=1e-14)
            np.testing.assert_allclose(p.detach().numpy(), r.detach().numpy(), rtol=0, atol=1e-14)
