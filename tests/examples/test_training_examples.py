"""The examples that train, on these ranks: gradients against autograd, steps of any number of ranks against those of
one process, and errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from example_programs import example

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


@pytest.mark.parametrize("model", [Perceptron])
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
