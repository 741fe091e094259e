"""Products of matrices in a file with checkpoints, in jobs that end before the product is complete."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from problems import gemm_error
from stored_files import by_rank_0, elements, only_file, read, write

from pdgemm.errors import MemoryLimitError
from pdgemm.io.source import source
from pdgemm.io.streamed.checkpoints import Checkpoints, When
from pdgemm.io.streamed.files_product import FilesProduct

M, N, K = 83, 61, 97
EACH_STEP, NEVER = When(0), When(1e9)


class Ended(Exception):
    """Raised in a test to end a job after a checkpoint."""


@contextmanager
def ending_after(saves: int | None) -> Iterator[None]:
    """End the enclosed job after its `saves`-th checkpoint, if it saves so many."""
    save, count = Checkpoints.save, itertools.count(1)

    def end(self: Any, *arguments: Any) -> None:
        save(self, *arguments)
        if next(count) == saves:
            raise Ended

    with pytest.MonkeyPatch.context() as patch, suppress(Ended):
        patch.setattr(Checkpoints, "save", end)
        yield


@contextmanager
def ended_after(saves: int | None) -> Iterator[None]:
    """End the enclosed job after its `saves`-th checkpoint, which it must save; with None, let it finish."""
    with ending_after(saves), nullcontext() if saves is None else pytest.raises(Ended):
        yield


def bytes_needed(error: object) -> int:
    """Return the least memory limit (bytes) that an error message names."""
    return int(str(error).split("(")[-1].split()[0])


class Problem:
    """A file with A, B and C, and products of them that are written to another file."""

    def __init__(self, grid: Any, folder: Path, dtype: str = "d") -> None:
        self.grid, self.comm, self.path = grid, grid.comm, folder / "x.h5"
        self.out, self.name = folder / "out.h5", "c"
        self.A, self.B, self.C = (elements(x, dtype, at) for at, x in enumerate(((M, K), (K, N), (M, N)), 1))
        self.begun: list[Any] = []  # [the checkpoint that the last run resumed, or None]
        self.write()

    def write(self) -> None:
        write(self.comm, self.path, a=(self.A, {}), b=(self.B, {}), c=(self.C, {}))

    def product(
        self, memory: int | None, alpha: Any = 1, beta: Any = 0, ops: str = "NN", names: Any = "ab", **more: Any
    ) -> Any:
        named = zip("AB", names, ops)
        a, b = (source(self.grid, what, (str(self.path), name), None, op) for what, name, op in named)
        entry = source(self.grid, "C on entry", (str(self.path), "c")) if beta else None
        return FilesProduct(self.grid, alpha, a, b, beta, entry, memory, most_flops=2e5, **more)

    def enough(self, share: float = 0.3, **more: Any) -> int:
        """Return a memory limit (bytes): 1.2 times the least for a product, and this share of A, B and C."""
        with pytest.raises(MemoryLimitError) as raised:
            self.product(1, **more)
        return int(1.2 * bytes_needed(raised.value) + share * 8 * (M * K + K * N + M * N) / self.grid.size)

    def run(self, little: bool = False, when: Any = EACH_STEP, memory: int | None = None, **more: Any) -> Any:
        """Run the product; return its report.   little : with memory for only 30% of the matrices."""
        how, self.begun = {key: more.pop(key) for key in ("progress", "seed") if key in more}, []
        product = self.product(self.enough(**more) if little else memory, **more)
        return product.run((str(self.out), self.name), when=when, begun=self.begun.append, **how)

    def is_right(self, beta: float = 0, alpha: float = 1) -> bool:
        C = read(self.comm, self.out, self.name)
        return gemm_error(C, alpha, self.A, self.B, beta, self.C) <= 3 * 8**0.5

    def files(self) -> list[str]:
        return only_file(self.path.parent, self.comm)

    def forget(self) -> None:
        """Remove the checkpoints that earlier jobs have saved."""
        by_rank_0(self.comm, lambda: [*map(Path.unlink, self.path.parent.glob("*checkpoint*"))])
