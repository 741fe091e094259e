"""Bit flips in products with `protect=`, on matrices with rows of any magnitude: none with a large effect is missed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from attacks.trial import Finding

ORDERS = (2, 3, 4, 6, 8, 13, 24, 40, 70)
CONSTANT = "constant rows"
SIZES = ("normal", CONSTANT, "a tiny row", "all tiny", "a subnormal row", "a tiny column", "a huge row", "all sizes")
PLACES = ("panel of A", "panel of B", "C")
LARGE = 0.1  # an error of this fraction of sum_k |a_ik| |b_k| + |c0_i| in row i must be found


def matrix(values: np.random.Generator, kind: str, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Return a random matrix whose rows or columns have the magnitudes of `kind`, one of SIZES."""
    tiny, least, huge = (1e-160, 5e-324, 1e130) if dtype in ("float64", "complex128") else (1e-25, 1e-44, 1e14)
    x = values.standard_normal(shape)
    if dtype[0] == "c":
        x = x + 1j * values.standard_normal(shape)
    row = int(values.integers(shape[0]))
    if kind == CONSTANT:
        x[:] = np.round(4 * x[:, :1] + 1)
    elif kind == "a tiny row":
        x[row] *= tiny
    elif kind == "all tiny":
        x *= tiny * 1e10
    elif kind == "a subnormal row":
        x[row] = least
    elif kind == "a tiny column":
        x[:, int(values.integers(shape[1]))] *= tiny
    elif kind == "a huge row":
        x[row] *= huge
    elif kind == "all sizes":
        x *= (10.0 ** values.integers(-15, 15, shape[0]))[:, None]
    return x.astype(dtype)


@contextmanager
def wrong_once(place: str, here: bool, bit: int) -> Iterator[None]:
    """Flip a bit once, if `here`: in a panel while it is multiplied, or in C after the product."""
    from pdgemm.algorithms.prepared import Prepared
    from pdgemm.algorithms.products.accumulator import Accumulator

    run, ready, left = Prepared._run, Accumulator.prepared, [here]

    def flip(x: Any) -> None:
        item = np.array(x[0, 0]).reshape(1)
        words = item.view(f"u{min(8, item.itemsize)}")
        words[0] ^= words.dtype.type(1 << bit)
        x[0, 0] = item[0]
        left[0] = False

    def prepared(self: Any, A: Any, B: Any, inner: Any = None) -> Any:
        multiply = ready(self, A, B, inner)

        def work() -> None:
            panel = {"panel of A": A, "panel of B": B}.get(place)
            if panel is None or not (left[0] and A.size and B.size):
                multiply()
                return
            before = panel.copy()  # the panel may be a view of the matrix, which does not change
            flip(panel)
            multiply()
            panel[...] = before

        return work

    def ended(self: Any, *arguments: Any) -> Any:
        report, C = run(self, *arguments), self._matrices[2]
        if place == "C" and left[0] and C.local.size:
            flip(C.local)
        return report

    Accumulator.prepared, Prepared._run = prepared, ended  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Accumulator.prepared, Prepared._run = ready, run  # type: ignore[method-assign]


def case(comm: Any, rng: random.Random, say: Callable[[str], None]) -> str:
    """Compute a product without and with a flipped bit.

    If the effect of the flip is large, it must be found, and with "repair" the result must be exactly the usual one.
    """
    from problems import DTYPES

    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.errors import CorruptionError

    m, n, k = (rng.choice(ORDERS) for _ in "mnk")
    of_a, of_b, of_c = (rng.choice(SIZES) for _ in "abc")
    dtype, beta, place, at = rng.choice(DTYPES), rng.choice((0, 0, 1)), rng.choice(PLACES), rng.randrange(comm.size)
    if place == "panel of A":
        of_b = rng.choice((CONSTANT, CONSTANT, of_b))
    bit = np.finfo(dtype).nmant + rng.randrange(1, 4)  # a bit of the exponent
    protect: Any = rng.choice(("detect", "repair"))
    say(f"({m}, {n}, {k}) {dtype} {of_a}, {of_b}, {of_c} beta={beta} {protect}, bit {bit} of a {place} on rank {at}")
    values = np.random.default_rng(rng.getrandbits(32))
    a, b, c = (
        matrix(values, of_a, (m, k), dtype),
        matrix(values, of_b, (k, n), dtype),
        matrix(values, of_c, (m, n), dtype),
    )
    with ProcessGrid(comm) as grid:
        A, B, C0 = (DistMatrix.from_global(x, grid=grid) for x in (a, b, c))

        def run(protect: Any) -> tuple[np.ndarray, Any]:
            C = pdgemm(1, A, B, beta, C0.copy(), algorithm="summa", protect=protect)
            report: Any = C.report
            return C.allgather(), report.checks

        right, _ = run(None)
        again, checks = run("repair")
        if checks is not None and checks.repeats:
            raise Finding("wrong", "an undisturbed product was repeated")
        if not np.array_equal(right, again, equal_nan=True):
            raise Finding("wrong", "a protected product differs from the plain one")
        with wrong_once(place, comm.rank == at, bit):
            damaged, _ = run(None)
        with np.errstate(all="ignore"):
            norms = np.array([np.hypot.reduce(np.abs(row)) for row in b.astype("D")])
            size = np.abs(a.astype("D")) @ norms + beta * np.abs(c.astype("D")).sum(axis=1)
            error = np.abs(damaged.astype("D") - right).max(axis=1)
            far = error > np.maximum(LARGE * size, 1e6 * k * np.finfo(dtype).smallest_subnormal)
        seen = False
        with wrong_once(place, comm.rank == at, bit):
            try:
                found, checks = run(protect)
            except CorruptionError:
                seen, found = protect == "detect", right
            else:
                seen = checks is not None and checks.repeats > 0
        if (far & np.isfinite(size)).any() and not (seen and np.array_equal(found, right, equal_nan=True)):
            raise Finding("wrong", f"a flip of large effect was missed in rows {np.flatnonzero(far)[:4]}")
    return "right"
