"""Printed matrices: corners as NumPy prints them, owners of elements as text and SVG, HTML for notebooks."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from pdgemm import DistMatrix, matmul, plan
from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.process_grid import default_grid

pytestmark = pytest.mark.mpi


def test_corners_are_as_numpy_prints_them(comm: Any, grid: Any) -> None:
    for shape in ((5, 4), (40, 50), (2, 900), (900, 3), (7, 300)):
        whole = np.arange(shape[0] * shape[1], dtype=float).reshape(shape) - 3.5
        A = DistMatrix.from_global(whole, grid=grid, block=3)
        text = A.preview()
        assert len(set(comm.allgather(text))) == 1
        if whole.size > 1000:  # equal to NumPy's, which pads all columns to the widest printed element
            assert text == str(whole)
        assert A.preview(edge=1).count("\n") <= 4 or whole.size <= 1000
    assert repr(A) in str(A) and ("A.preview()" in str(A)) == (comm.size > 1)
    if comm.rank == 0:
        assert str(A.local) in str(A)  # not collective: one rank may print


def test_owners_of_elements(comm: Any, grid: Any) -> None:
    A = DistMatrix.zeros((6, 5), grid=grid, block=2)
    picture = A.draw()
    lines = [line.split() for line in str(picture).splitlines()[1:]]
    assert lines[0] == ["0:2", "2:4", "4:5"]
    for line, start in zip(lines[1:], range(0, 6, 2)):
        owners = [grid.rank_map[i * grid.shape[1] + j] for i, j in (A.distribution.owner(start, j) for j in (0, 2, 4))]
        assert line == [f"{start}:{start + 2}", *(f"[{x}]" if x == comm.rank else f"{x}" for x in owners)]
    many = DistMatrix.zeros((100, 5), grid=grid, block=2).draw()
    assert str(many).splitlines()[-1].split() == ["...", "...", "...", "..."] and len(str(many).splitlines()) == 15
    product = matmul(A, A.T)
    empty = DistMatrix.zeros((0, 0), grid=grid)
    for shown in (picture, many, A, product, product.report, A.redistribute(block=3).report, plan(A, A.T), empty):
        html = shown._repr_html_()  # type: ignore[attr-defined]
        ElementTree.fromstring(html)  # raises if not well formed
        assert "<pre>" in html
    assert picture.svg.count("<rect") == 9 and 'stroke="#1a1a1a"' in picture.svg
    assert plan(A, A.T)._repr_html_().count("<svg") == 3


def test_ones_full_diag_and_the_default_grid(comm: Any, grid: Any) -> None:
    v = np.array([1.5, -2, 3])
    for made, expected in (
        (DistMatrix.ones((5, 4), grid=grid, block=2), np.ones((5, 4))),
        (DistMatrix.ones((5, 4), grid=grid, dtype="int8"), np.ones((5, 4), "int8")),
        (DistMatrix.full((5, 4), 7, grid=grid, order="F"), np.full((5, 4), 7)),
        (DistMatrix.full((5, 4), 2 - 1j, grid=grid), np.full((5, 4), 2 - 1j)),
        *((DistMatrix.diag(v, k, grid=grid, block=1), np.diag(v, k)) for k in (-2, 0, 3)),
        (DistMatrix.diag([1, 2], grid=grid, dtype="float32"), np.diag([1, 2]).astype("float32")),
        (DistMatrix.diag(v[:0], 2, grid=grid), np.diag(v[:0], 2)),
    ):
        assert made.dtype == expected.dtype and np.array_equal(made.allgather(), expected)
    last = comm.rank == comm.size - 1
    for wrong, error in (
        (lambda: DistMatrix.full((2, 2), [1, 2], grid=grid), ArgumentError),
        (lambda: DistMatrix.diag(np.eye(2), grid=grid), LayoutError),
        (lambda: DistMatrix.diag(v + (last and comm.size > 1), "k", grid=grid), ArgumentError),
    ):
        with pytest.raises(error):
            wrong()
    if comm.size > 1:
        for differs in (
            lambda: DistMatrix.full((2, 2), float(last), grid=grid),
            lambda: DistMatrix.diag(v + last, grid=grid),
        ):
            with pytest.raises(ArgumentError, match="different arguments"):
                differs()
    with pytest.raises(TypeError, match=r"DistMatrix.from_global\(array\)"):
        DistMatrix(np.eye(3))
    A = DistMatrix.zeros((3, 3))
    others = (DistMatrix.eye(3), DistMatrix.random((3, 3)), DistMatrix.from_global(np.eye(3)), DistMatrix.diag(v))
    assert all(x.grid is A.grid for x in others) and A.grid is default_grid() and A.grid.size == comm.size
    assert np.array_equal((A + others[-1]).allgather(), np.diag(v))
    default_grid().free()
    assert DistMatrix.ones((2, 2)).sum() == 4  # on a new grid, after the first was freed
    default_grid().free()
