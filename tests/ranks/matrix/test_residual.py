"""`verify` passes if, and only if, rounding errors explain the residual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problems import DTYPES, grid_shapes
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, pdgemm, verify
from pdgemm.errors import ArgumentError, LayoutError

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass_and_a_single_wrong_element_does_not(comm: Any, dtype: str) -> None:
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            made: dict[str, Any] = {"grid": grid, "block": 5, "dtype": dtype, "kind": "normal"}
            A = DistMatrix.random((40, 60), seed=1, **made)
            B = DistMatrix.random((60, 30), seed=2, **made)
            C0 = DistMatrix.random((40, 30), seed=3, **made)
            C = pdgemm(2, A, B, -1, C0.copy())
            for seed in range(3):
                residual = verify(C, 2, A, B, -1, C0, seed=seed)
                assert residual.passed
                assert residual.rows == 40
                assert len(set(comm.allgather(residual))) == 1
            assert not verify(C, 2.01, A, B, -1, C0).passed
            assert not verify(C, 2, A, B, -1.1, C0).passed
            if C.distribution.owner(39, 29) == grid.coords:
                C.local[-1, -1] += 0.1  # elements are about 15
            assert not verify(C, 2, A, B, -1, C0).passed


@pytest.mark.parametrize(
    ("compute", "dtype"),
    in_turn([None, "float32", "tf32", "float16", "bfloat16"], ["float16", "bfloat16", "float32", "float64"]),
)
def test_rounded_operands_and_results(grid: Any, compute: str | None, dtype: str) -> None:
    """Rounding explains a fraction of |A||B| that does not grow with k: a wrong factor is noticed at k = 1500, too."""
    made: dict[str, Any] = {"grid": grid, "block": 50, "dtype": dtype}
    A, B = DistMatrix.random((20, 1500), seed=1, **made), DistMatrix.random((1500, 30), seed=2, **made)
    C0 = DistMatrix.random((20, 30), seed=3, **made)
    for algorithm in ("summa", "stationary_a", "inner"):
        C = pdgemm(2, A, B, -1, C0.copy(), algorithm=algorithm, compute_type=compute)
        residual = verify(C, 2, A, B, -1, C0, compute_type=compute)
        assert residual.passed, str(residual)
        assert residual.bound < 0.02
        assert not verify(C, 2.5, A, B, -1, C0, compute_type=compute).passed
    with pytest.raises(ArgumentError, match="compute_type 'half' is not one of float32, tf32"):
        verify(C, 2, A, B, -1, C0, compute_type="half")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zeros_and_one_missing_element_of_a_wide_product_are_seen(grid: Any, dtype: str) -> None:
    """A product of zeros, and one missing addend of one element in a wide product, are noticed."""
    made: dict[str, Any] = {"grid": grid, "dtype": dtype, "kind": "normal"}
    A, B = DistMatrix.random((8, 2000), seed=1, **made), DistMatrix.random((2000, 2000), seed=2, **made)
    C = pdgemm(1, A, B)
    assert verify(C, 1, A, B).passed
    assert verify(DistMatrix.zeros(C.shape, grid=grid, dtype=dtype), 1, A, B).wrong
    if dtype == "float32":
        A, B = DistMatrix.random((4, 50), seed=1, **made), DistMatrix.random((50, 20000), seed=2, **made)
        C = pdgemm(1, A, B)
        if C.distribution.owner(0, 0) == grid.coords:
            C.local[0, 0] += 4  # one of 20,000 elements of about 7
        assert verify(C, 1, A, B, vectors=20).wrong


def test_undecidable_results_do_not_pass(grid: Any) -> None:
    """Undecidable: nothing is compared, C = 0 would pass, or sums of moduli overflow."""
    one, nan = (DistMatrix.from_global(np.full((6, 6), x), grid=grid) for x in (1.0, np.nan))
    told = verify(nan, 1, one, nan)
    assert not (told.passed or told.wrong) and (told.rows, told.not_finite) == (0, 6)
    assert str(told).splitlines()[0].endswith("this check cannot tell")
    zeros = DistMatrix.zeros((6, 6), grid=grid)
    assert verify(zeros, 1, zeros, one).passed  # exactly
    A = DistMatrix.random((6, 40), grid=grid, kind="normal", dtype="float32", seed=1)
    B = DistMatrix.random((40, 6), grid=grid, kind="normal", dtype="float32", seed=2)
    small = pdgemm(1, A, B) * 0
    told = verify(small, 1e-3, A, B, 1, pdgemm(-1e-3, A, B), compute_type="bfloat16")  # right, by cancellation
    assert not (told.passed or told.wrong) and "with zeros in place of C it is" in str(told)
    signs = np.tile([1.0, -1.0], 2000)[None]  # |C X| is finite, and |C||X| is not
    B = DistMatrix.from_global(signs * 2e305, grid=grid)
    A = DistMatrix.from_global(np.ones((1, 1)), grid=grid)
    for C in (B.copy(), B * 0.5):
        told = verify(C, 1, A, B)
        assert not (told.passed or told.wrong)


def test_edges(grid: Any) -> None:
    zeros = {shape: DistMatrix.zeros(shape, grid=grid) for shape in [(3, 0), (0, 4), (3, 4), (0, 3)]}
    assert verify(zeros[3, 4], 1, zeros[3, 0], zeros[0, 4]).passed
    assert verify(zeros[0, 4], 1, zeros[0, 3], zeros[3, 4]).passed
    assert not verify(zeros[3, 4] + 1e-30, 1, zeros[3, 0], zeros[0, 4]).passed
    with pytest.raises(LayoutError, match=r"op\(A\) is 3 x 4, op\(B\) is 3 x 4, C is 3 x 4$"):
        verify(zeros[3, 4], 1, zeros[3, 4], zeros[3, 4])
    with pytest.raises(LayoutError, match="C0 is missing"):
        verify(zeros[3, 4], 1, zeros[3, 0], zeros[0, 4], beta=1)


def test_nan_is_right_where_it_belongs_and_wrong_elsewhere(grid: Any) -> None:
    nan = DistMatrix.from_function(lambda i, j: np.nan, (6, 6), grid=grid)
    assert verify(DistMatrix.zeros((6, 6), grid=grid), 0, nan, nan).passed  # alpha 0: they are not read
    a = np.ones((6, 6))
    a[2, 3] = np.nan
    A, B = DistMatrix.from_global(a, grid=grid), DistMatrix.eye(6, grid=grid)
    C = A @ B
    residual = verify(C, 1, A, B)
    assert residual.passed
    assert (residual.rows, residual.not_finite, residual.misplaced) == (5, 1, 0)
    assert str(residual).splitlines()[1].startswith("warning: 1 of 6 rows of C hold NaN")
    clean = DistMatrix.from_global(np.ones((6, 6)), grid=grid)
    wrong = verify(C, 1, clean, B)
    assert not wrong.passed
    assert wrong.misplaced == 1
