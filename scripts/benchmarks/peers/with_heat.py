"""Heat's matmul: A and B split by rows or by columns."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from unittest.mock import MagicMock

from peers.worker import Block, Maker, Setting, Way, filled, nothing, product

if find_spec("torchvision") is None:  # Heat imports it only for its data sets, and PyPI has no builds without CUDA
    sys.modules |= dict.fromkeys(("torchvision", "torchvision.datasets", "torchvision.transforms"), MagicMock())

import heat
import torch


def kernel() -> str | None:
    """Make torch's MKL print its kernel, and return None; return "" if torch has another BLAS."""
    if not torch.backends.mkl.is_available():
        return ""
    with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
        torch.ones(2, 2) @ torch.ones(2, 2)
    return None


def makers(setting: Setting) -> Iterator[Maker]:
    for splits in itertools.product((0, 1), repeat=2):
        yield partial(make, setting, splits)


def make(setting: Setting, splits: tuple[int, ...]) -> Way:
    """Return a product with given splits; with layout "columns", matrices are split again before and after."""
    m, n, k = setting.mnk
    columns = setting.layout == "columns"
    at = (1, 1) if columns else splits
    A, B = (random(setting, extents, split, seed) for extents, split, seed in zip(((m, k), (k, n)), at, (1, 2)))
    result: list[heat.DNDarray] = []

    def run() -> None:
        C = heat.matmul(split(A, splits[0]), split(B, splits[1]))
        result[:] = [split(C, 1) if columns else C]

    return product(
        setting,
        f"{'multiplied' if columns else 'A and B'} with split = {splits[0]}, {splits[1]}",
        run,
        lambda: (block(A), block(B), block(result[0])),
    )


def random(setting: Setting, shape: tuple[int, int], axis: int, seed: int) -> heat.DNDarray:
    _, _, (rows, cols) = heat.MPI_WORLD.chunk(shape, axis)
    local = filled(shape, rows, cols, seed, setting.dtype).values
    return heat.array(torch.from_numpy(local), is_split=axis, copy=False)


def split(x: heat.DNDarray, axis: int) -> heat.DNDarray:
    return x if x.split == axis else heat.resplit(x, axis)


def block(x: heat.DNDarray) -> Block:
    if x.split is None and x.comm.rank:
        return nothing()
    _, _, slices = x.comm.chunk(x.shape, x.split)
    rows, cols = (range(*part.indices(extent)) for part, extent in zip(slices, x.shape))
    return Block(rows, cols, x.larray.numpy())
