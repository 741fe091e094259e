"""digits.py on these ranks: gradients by differences, the losses of one process, words, and what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_programs import example
from mpi4py import MPI

from pdgemm.parallel import Mesh
from pdgemm.schedules.collectives.collective import sum_of_array

pytestmark = pytest.mark.mpi
COUNT, STEPS, BATCH = 70, 4, 21  # which ranks divide unevenly


@pytest.fixture
def mesh(comm: Any) -> Iterator[Mesh]:
    with Mesh(comm.Dup(), dp=-1) as mesh:
        yield mesh


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.random((COUNT, 64)), rng.integers(0, 10, COUNT)


def test_gradients_are_slopes_of_the_loss(mesh: Mesh) -> None:
    """Summed over the ranks, along a direction in each layer: weights and biases."""
    digits, (x, labels), line, rng = example("digits"), samples(), mesh.line("dp"), np.random.default_rng(6)
    own = np.array_split(np.arange(COUNT), line.size)[line.rank]
    parameters, gradients = 0.1 * rng.standard_normal((2, digits.ENDS[-1]))

    def loss(p: np.ndarray) -> float:
        values = digits.forward(p, x[own])
        (total,) = mesh.sum(digits.backward(line, p, gradients, values, labels[own], COUNT))
        mesh.transfers.complete()
        return total

    for layer in range(3):
        direction = np.zeros_like(parameters)
        digits.layers(direction)[layer][...] = rng.standard_normal(digits.layers(direction)[layer].shape)
        slope = (loss(parameters + 1e-6 * direction) - loss(parameters - 1e-6 * direction)) / 2e-6
        loss(parameters)
        assert abs(gradients @ direction - slope) <= 1e-6 * abs(slope), layer


@pytest.mark.on_ranks(2, 3)
def test_losses_are_those_of_one_process(comm: Any, mesh: Mesh) -> None:
    """To rounding, and the same to the bit on all ranks; the counted words are those of the collectives."""
    digits = example("digits")
    parameters, losses = digits.train(mesh, *samples(), STEPS, BATCH)
    with Mesh(MPI.COMM_SELF, dp=1) as alone:
        expected, losses_of_one = digits.train(alone, *samples(), STEPS, BATCH)
    np.testing.assert_allclose(losses, losses_of_one, rtol=1e-12)
    np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-9)  # Adam divides by roots of small squares
    assert all(x == parameters.tobytes() for x in comm.allgather(parameters.tobytes()))
    of_step = [sum_of_array(n, comm.size, np.dtype("d")).traffic(comm.rank) for n in np.diff(digits.ENDS).tolist()]
    assert mesh.traffic["gradients"] == sum(of_step * STEPS, type(of_step[0])())


def test_digits(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Digits that were held out are read right, and rank 0 prints the words that the formula predicts."""
    picture = shared_tmp_path / "digits.png"
    example("digits").main("--steps", "150", "--picture", str(picture))
    comm.Barrier()
    printed = capsys.readouterr().out
    if comm.rank:
        assert printed == ""
        return
    loss, share, words = printed.splitlines()
    assert re.fullmatch(r"step 100: loss 0\.\d{3}", loss)
    assert (found := re.match(r"(\d+)% of 297 digits", share)) and int(found[1]) >= 95
    assert (found := re.fullmatch(r"(\d+) words .* rank 0, (\d+) by formula", words)) and found[1] == found[2]
    assert picture.read_bytes().startswith(b"\x89PNG")
