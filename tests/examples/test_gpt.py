"""docs/examples/gpt on every mesh of these ranks: losses, norms of gradients and parameters are those of one process,
gradients those of autograd, and what moves and what is kept is what formulas say.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import gpt_reference
import numpy as np
import pytest
from example_programs import example
from tiers import thorough

pytestmark = pytest.mark.mpi
SIZES = "--vocabulary 1009 --hidden 48 --heads 4 --layers 5 --sequence 33 --batch 12 --dtype float64 --no-report"
MIXTURE = "--experts 4 --capacity 1.0"
STEPS = 3


def meshes(ranks: int, experts: int = 0) -> Iterator[dict[str, int]]:
    """Yield all meshes of the ranks that 4 heads, 5 layers and the experts can be divided on."""
    for dp, tp, pp, cp in product(range(1, ranks + 1), (1, 2, 4), range(1, 6), range(1, ranks + 1)):
        if dp * tp * pp * cp == ranks:
            for ep in range(1, dp + 1) if experts else (1,):
                if not dp % ep and not (experts and experts % ep):
                    yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


def words_of(mesh: dict[str, int]) -> list[str]:
    return [word for axis, n in mesh.items() for word in (f"--{axis}", str(n))]


def run_of(comm: Any, *words: str, steps: int = STEPS) -> tuple[Any, np.ndarray]:
    """Return a run of some steps, and the loss and the norm of the gradients of each step."""
    train = example("gpt/train")
    run = train.Run(train.parsed([*SIZES.split(), "--steps", str(steps), *words]), comm)
    return run, np.array([numbers for _, *numbers in run.steps(text())])


@cache
def text() -> np.ndarray:
    return np.random.default_rng(8).integers(0, 1009, 700)


@cache
def one_process(words: str, steps: int = STEPS) -> np.ndarray:
    from mpi4py import MPI

    return run_of(MPI.COMM_SELF, "--dp", "1", *words.split(), steps=steps)[1]


@pytest.mark.parametrize("steps", [STEPS, pytest.param(50, marks=thorough)])
@pytest.mark.parametrize("model", ["", MIXTURE])
def test_every_mesh_has_the_losses_of_one_process(comm: Any, model: str, steps: int) -> None:
    """In float64 to 1e-12, and so the norms of the gradients."""
    expected = one_process(model + " --microbatches 2", steps)
    for mesh in meshes(comm.size, 4 if model else 0):
        _, numbers = run_of(comm, *words_of(mesh), *model.split(), "--microbatches", "2", steps=steps)
        np.testing.assert_allclose(numbers, expected, rtol=1e-12, err_msg=str(mesh))
