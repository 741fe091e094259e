"""dask.array on the threads of one process: one or two chunks for each thread, of C or of the inner dimension."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import dask
import dask.array as da
import numpy as np

from peers.worker import Block, Maker, Setting, Way, boxes, filled, product


def makers(setting: Setting) -> Iterator[Maker]:
    threads = int(setting.variant)
    dask.config.set(scheduler="threads", num_workers=threads)
    for count in (threads, 2 * threads):
        for cuts in boxes(count, 3):
            yield partial(make, setting, threads, cuts)


def make(setting: Setting, threads: int, cuts: tuple[int, ...]) -> Way:
    """Return a product in given chunks; with layout "columns", matrices in columns are rechunked before and after."""
    (m, n, k), columns, whole = setting.mnk, setting.layout == "columns", slice(None)
    mb, nb, kb = (-(-extent // cut) for extent, cut in zip(setting.mnk, cuts))
    A, B = (filled(shape, whole, whole, seed, setting.dtype) for shape, seed in (((m, k), 1), ((k, n), 2)))
    a = chunked(A.values, (m, -(-k // threads)) if columns else (mb, kb))
    b = chunked(B.values, (k, -(-n // threads)) if columns else (kb, nb))
    result: list[da.Array] = []

    def run() -> None:
        c = a.rechunk((mb, kb)) @ b.rechunk((kb, nb))
        result[:] = [(c.rechunk((m, -(-n // threads))) if columns else c).persist()]

    return product(
        setting,
        f"chunks {mb} x {kb} and {kb} x {nb}, {threads} threads",
        run,
        lambda: (A, B, Block(range(m), range(n), result[0].compute())),
    )


def chunked(x: np.ndarray, chunks: tuple[int, int]) -> da.Array:
    """Return a dask array whose chunks are contiguous."""
    return da.from_array(x, chunks, name=False).map_blocks(np.ascontiguousarray).persist()
