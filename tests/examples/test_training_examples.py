"""The examples that train, on these ranks: gradients against autograd, steps of any number of ranks against those of
one process, and errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from example_programs import EXAMPLES, example
from mpi4py import MPI
from tiers import thorough

from pdgemm import PdgemmError
from pdgemm.parallel import Buckets, Mesh

pytestmark = pytest.mark.mpi
COUNT = 20  # samples of a step, which ranks divide unevenly


@pytest.fixture
def mesh(comm: Any) -> Iterator[Any]:
    with Mesh(comm.Dup(), dp=-1) as mesh:
        yield mesh


def samples(mesh: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images, labels, and the numbers of those of this rank."""
    rng = np.random.default_rng(5)
    own = np.array_split(np.arange(COUNT), mesh.shape.dp)[mesh.index("dp")]
    return rng.random((COUNT, 64)), rng.integers(0, 10, COUNT), own


# ---------------------------------------------------------------- gradients
class Perceptron:
    """digits.py: its gradients, and its logits as autograd or NumPy computes them."""

    initial = staticmethod(lambda: {name: x.astype(float) for name, x in example("digits").initial().items()})

    @staticmethod
    def add_gradients(buckets: Any, x: np.ndarray, labels: np.ndarray) -> None:
        digits = example("digits")
        digits.backward(buckets, digits.forward(buckets.parameters, x), labels, 1 / COUNT)

    @staticmethod
    def logits(xp: Any, p: Any, x: Any) -> Any:
        for layer in "12":
            x = xp.maximum(x @ p["w" + layer] + p["b" + layer], 0)
        return x @ p["w3"] + p["b3"]


class Convolutions:
    """digits_conv.py: the same; a convolution here is a sum over the nine places of its weights."""

    initial = staticmethod(lambda: example("digits_conv").initial())

    @staticmethod
    def add_gradients(buckets: Any, x: np.ndarray, labels: np.ndarray) -> None:
        network = example("digits_conv").Network(buckets, buckets.mesh.sum)
        network.backward(network.forward(x), labels, COUNT)

    @staticmethod
    def logits(xp: Any, p: Any, x: Any) -> Any:
        def layer(number: int, x: Any) -> Any:
            padded = xp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "constant")
            weights = p[f"w{number}"].reshape(3, 3, x.shape[3], -1)
            x = sum(
                xp.einsum("nhwc,ck->nhwk", padded[:, i : i + 8, j : j + 8], weights[i, j])
                for i, j in product(range(3), repeat=2)
            )
            mean = xp.mean(x, axis=(0, 1, 2))
            variance = xp.mean((x - mean) ** 2, axis=(0, 1, 2))
            return p[f"scale{number}"] * (x - mean) / xp.sqrt(variance + 1e-5) + p[f"shift{number}"]

        x = xp.maximum(layer(0, x.reshape(-1, 8, 8, 1)), 0)
        for first in 1, 3:
            x = xp.maximum(x + layer(first + 1, xp.maximum(layer(first, x), 0)), 0)
        pooled = sum(x[:, i::2, j::2] for i, j in product(range(2), repeat=2)) / 4
        return pooled.reshape(COUNT, -1) @ p["w"] + p["b"]


def loss(xp: Any, model: Any, p: Any, x: np.ndarray, labels: np.ndarray) -> Any:
    """Return the cross-entropy, averaged over all samples."""
    logits = model.logits(xp, p, x)
    own = logits[np.arange(COUNT), labels]
    return xp.sum(xp.log(xp.sum(xp.exp(logits - 9), axis=1)) + 9 - own) / COUNT


def gradients(mesh: Any, model: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the parameters of a model, and the gradients of the first step, to which each rank adds its part."""
    x, labels, own = samples(mesh)
    values = model.initial()
    rng = np.random.default_rng(6)
    for value in values.values():  # shifts, scales and biases are 0 and 1 at first
        if value.ndim == 1:
            value += 0.1 * rng.standard_normal(value.shape)
    buckets = Buckets(mesh, values)
    model.add_gradients(buckets, x[own], labels[own])
    buckets.finish()
    return values, {name: buckets.gradients[name].copy() for name in values}


@pytest.mark.parametrize("model", [Perceptron, Convolutions])
def test_gradients_are_those_of_autograd(mesh: Any, model: Any) -> None:
    """At step 1, in float64, to 1e-13 of the norm of all gradients."""
    autograd = pytest.importorskip("autograd")
    import autograd.numpy as xp

    x, labels, _ = samples(mesh)
    values, computed = gradients(mesh, model)
    expected = autograd.grad(lambda p: loss(xp, model, p, x, labels))(values)
    norm = np.sqrt(sum(np.square(g).sum() for g in expected.values()))
    for name in values:
        assert np.linalg.norm(computed[name] - expected[name]) <= 1e-13 * norm, name


# ---------------------------------------------------------------- steps
def test_digits(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every stage and in 16 bits: what is held out is read right, and a job goes on where another has ended."""
    main, path = example("digits").main, shared_tmp_path / "run.h5"
    for how in (["--zero", "2", "--dtype", "float16"], ["--zero", "3", "--microbatches", "3"]):
        main(*how, "--steps", "150")
        printed = capsys.readouterr().out
        if comm.rank == 0:
            share = re.search(r"(\d+)% of 297 digits", printed)
            assert share and int(share[1]) >= 97
            assert printed.count("as predicted") == 2 and "150 steps in" in printed
        else:
            assert printed == ""
    whole = ["--dtype", "float64", "--steps", "20", "--no-report"]
    picture = shared_tmp_path / "digits.png"
    main(*whole, "--state", str(shared_tmp_path / "whole.h5"), "--picture", str(picture))
    main(*whole, "--state", str(path), "--zero", "1")
    comm.Barrier()
    with h5py.File(path) as one, h5py.File(shared_tmp_path / "whole.h5") as other:
        for kind in one:
            for name in one[kind]:
                np.testing.assert_allclose(one[kind][name], other[kind][name], rtol=1e-9, atol=1e-12)
    assert picture.read_bytes().startswith(b"\x89PNG")


ERRORS = {
    "--state": "was not written by save_all",
    "--microbatches 3 --same-bits": "a binary tree adds a power of two of microbatches, got 3",
    "--dtype float16x": "'float16x' is not a type of elements",
    "--zero 4": "stage is 0, 1, 2 or 3, got 4",
    "--batch 0": "batch must be >= 1, got 0",
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_of_digits(comm: Any, shared_tmp_path: Path, words: str) -> None:
    """Each is one exception of the package on all ranks, by which the program leaves."""
    if words == "--state":
        if comm.rank == 0:
            with h5py.File(shared_tmp_path / "foreign.h5", "w") as file:
                file["x"] = 1.0
        comm.Barrier()
        words = f"--state {shared_tmp_path / 'foreign.h5'}"
    with pytest.raises(PdgemmError, match=ERRORS[words.partition(" /")[0]]):
        example("digits").main(*words.split(), "--steps", "1")


def trained(mesh: Any, steps: int, total: Callable[..., Any], zero: int = 0) -> SimpleNamespace:
    """Some steps of digits_conv.py: losses, averages of statistics, parameters, and logits of images held out."""
    module, (x, labels, _) = example("digits_conv"), samples(mesh)
    options = module.parsed(["--steps", str(steps), "--batch", str(COUNT - 1), "--zero", str(zero)])
    losses, network = module.train(options, mesh, x, labels, total)
    with network.buckets.forward():
        parameters = {name: network.p[name].copy() for name in network.p}
        logits = network.forward(x, learning=False)
    averages = np.array([network.averages[layer] for layer in range(5)])
    return SimpleNamespace(losses=np.array(losses), averages=averages, parameters=parameters, logits=logits)


def test_steps_of_convolutions_are_those_of_one_process(comm: Any, mesh: Any) -> None:
    """Three steps in float64: losses to 1e-11; averages and logits too, and the same to the bit on all ranks."""
    here = trained(mesh, 3, mesh.sum, zero=3)
    with Mesh(MPI.COMM_SELF, dp=1) as alone:
        one = trained(alone, 3, alone.sum)
    np.testing.assert_allclose(here.losses, one.losses, rtol=1e-11)
    np.testing.assert_allclose(here.averages, one.averages, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(here.logits, one.logits, rtol=1e-9, atol=1e-10)
    for mine in (here.losses, here.averages, here.logits):
        assert all(np.array_equal(mine, other) for other in comm.allgather(mine))


@pytest.mark.parametrize("steps", [40, pytest.param(100, marks=thorough)])
def test_digits_conv(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    """The losses of all its steps are those of the gallery on any number of ranks."""
    picture = shared_tmp_path / "digits_conv.png"
    example("digits_conv").main("--steps", str(steps), "--picture", str(picture))
    comm.Barrier()
    printed = capsys.readouterr().out
    if comm.rank == 0:
        shown = (EXAMPLES / "README.md").read_text().partition("examples/digits_conv.py")[2]
        losses = re.findall(r"step \d+: loss [\d.]+", printed)
        assert len(losses) == steps // 20
        assert steps < 100 or losses == re.findall(r"step \d+: loss [\d.]+", shown)[: len(losses)]
        share = re.search(r"(\d+)% of 297 digits", printed)
        assert share and int(share[1]) >= (90 if steps < 100 else 97)
    else:
        assert printed == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
