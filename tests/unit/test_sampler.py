"""The order of samples as a function of the seed, and the parts of replicas."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pdgemm.errors import ArgumentError
from pdgemm.parallel.sampler import Sampler, shuffled


def test_an_order_of_samples_is_a_permutation() -> None:
    for n in [*range(1, 70), 997, 1000, (1 << 18) - 3, (1 << 18) + 7]:
        order = shuffled(np.arange(n), n, seed=n % 5, epoch=n % 3)
        assert np.array_equal(np.bincount(order, minlength=n), np.ones(n))
    orders = {shuffled(np.arange(50), 50, seed, epoch).tobytes() for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_any_replicas_take_the_samples_of_one() -> None:
    """From any step: the same samples in the same order."""
    sampler = Sampler(101, 60, 3)
    epochs = np.concatenate([sampler.rows(step) for step in range(101)])
    assert (np.bincount(epochs) == 60).all()  # each sample once an epoch, in another order each time
    assert len({epochs[at : at + 101].tobytes() for at in range(0, len(epochs), 101)}) == 60
    for first, replicas in product((0, 17), (1, 2, 7)):
        steps = range(first, first + 3)
        parts = [sampler.batches(steps, index, replicas) for index in range(replicas)]
        assert {*map(len, parts)} == {3}
        for step, of_step in zip(steps, zip(*parts)):
            assert np.array_equal(np.concatenate(of_step), sampler.rows(step))
            assert max(map(len, of_step)) - min(map(len, of_step)) <= 1
    assert np.array_equal(Sampler(101, 60, 3, start=17 * 60).rows(0), sampler.rows(17))
    assert sampler.state(17) == {"count": 101, "seed": 3, "taken": 17 * 60}


def test_numbers_out_of_range() -> None:
    with pytest.raises(ArgumentError, match="a batch of 60 samples has no part for replica 60 of 61"):
        Sampler(101, 60).batches(range(3), 60, 61)
    with pytest.raises(ArgumentError, match="replica 2 of 2"):
        Sampler(101, 60).batches(range(3), 2, 2)
    for bad in ({"count": 0}, {"batch": 0}, {"start": -1}):
        with pytest.raises(ArgumentError):
            Sampler(**{"count": 10, "batch": 5} | bad)
