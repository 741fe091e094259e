"""Contractions of tensors compared with NumPy's: the expressions of NumPy's own tests, and bad arguments."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_einsums import checked, compare, machine_of
from drawn_tensors import elements, tensor_of

import pdgemm
from pdgemm import DistMatrix, DistTensor
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, MemoryLimitError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.planning.tensors.resources import Resources
from pdgemm.tensors.tensor_base import in_layout

pytestmark = [pytest.mark.mpi, tiers.every_grid]

EXTENTS = dict(
    zip("abcdefghijklmnopqrstuvwxyz", (3, 2, 4, 3, 2, 5, 2, 3, 2, 4, 3, 5, 2, 3, 2, 3, 4, 3, 2, 3, 2, 3, 2, 4, 3, 5))
)
# the expressions of NumPy's tests whose operands have one axis of each letter's extent
PLAIN = """
ij ji ii->i jii->ij iii->i ijk->jik i-> ii
i,j ij,j ji,j ij,jk ij,jk,kl ijk,jil->kl i,i,i->i ,i-> i,-> i,i i,->i ,i->i z,mz,zm-> ij,ij->j ji,i-> i,ij-> ij,i->
ijklm,ijn,ijn-> ijklm,ijn-> x,yx,zx->xzy ijk,j->ijk ik,kj->ij ijkl,k->ijl ijkl,k cl,cpx->lpx cl,cpxy->lpxy aabb->ab
ijij-> mi,mi,mi->m im,im,im->m ij,jk->ik i,i->i i,i-> i,i,i-> i,i,i,i-> a,ab,abc->abc a,b,ab->ab
ea,fb,gc,hd,abcd->efgh ea,fb,abcd,gc,hd->efgh abcd,ea,fb,gc,hd->efgh
acdf,jbje,gihb,hfac,gfac,gifabc,hfac cd,bdhe,aidb,hgca,gc,hgibcd,hgac abhe,hidj,jgba,hiab,gab
bde,cdh,agdb,hica,ibd,hgicd,hiac chd,bde,agbc,hiad,hgc,hgi,hiad chd,bde,agbc,hiad,bdi,cgh,agdb bdhe,acad,hiab,agac,hibd
ab,ab,c-> ab,ab,c->c ab,ab,cd,cd-> ab,ab,cd,cd->ac ab,ab,cd,cd->cd ab,ab,cd,cd,ef,ef->
ab,cd,ef->abcdef ab,cd,ef->acdf ab,cd,de->abcde ab,cd,de->be ab,bcd,cd->abcd ab,bcd,cd->abd
eb,cb,fb->cef dd,fb,be,cdb->cef bca,cdb,dbf,afc-> dcc,fce,ea,dbf->ab fdf,cdd,ccd,afe->ae abcd,ad ed,fcd,ff,bcf->be
baa,dcf,af,cde->be bd,db,eac->ace fff,fae,bef,def->abd efc,dbc,acf,fd->abe ba,ac,da->bcd
ab,ab ab,ba abc,abc abc,bac abc,cba
aab,fa,df,ecc->bde ecb,fef,bad,ed->ac bcf,bbb,fbf,fc-> bb,ff,be->e bcb,bb,fc,fff-> fbb,dfd,fc,fc-> afd,ba,cc,dc->bf
adb,bc,fa,cfc->d bbd,bda,fc,db->acf dba,ead,cad->bce aef,fbc,dca->bde bbcdc->d obk,ijk->ioj
a,b,c->abc acdf,jbje,gihb,hfac a,ac,ab,ad,cd,bd,bc-> cab,cdd->ab ab,bc,cd,de->ae
"""
SHAPED: list[tuple[str, list[tuple[int, ...]]]] = [
    *[(e, [(3, 4)]) for e in ("...", "...->...", "i...->...", "...i->...", "... a -> ... a", "...a->...a")],
    *[(e, [(4, 3, 3)]) for e in ("...ii->...i", "...ii->i...", "...jj", "i...->...")],
    *[(e, [(3, 3, 4)]) for e in ("ii...->...i", "ii...->i...")],
    *[(e, [(3, 4, 3)]) for e in ("i...i->i...", "i...i->...i")],
    *[("..., ...", [(), ()]), ("..., ...", [(3, 4), (4,)]), ("...i, ...i", [(2, 3, 4), (4,)])],
    *[("i..., i...", [(3, 2, 2), (3, 2)]), ("...,...", [(5,), (5,)]), ("...i,...i", [(3,), (3,)])],
    *[(e, [(3, 4), (4, 2)]) for e in ("ij...,jk...->ik...", "ij, j... -> i...")],
    *[("...ij,...jk->...ik", [(2, 3, 3), (2, 3, 3)]), ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 2)])],
    *[("ij...,j...->i...", [(1, 2), (2, 2, 1)]), ("ij...,j...->ij...", [(2, 3, 4), (3,)])],
    *[(e, [(2, 3, 4), (3,)]) for e in ("ij...,...j->ij...", "ij...,j->ij...")],
    *[(e, [(4, 3), (3, 2)]) for e in ("ik...,k...->i...", "ik...,...kj->i...j", "...k,kj", "ik,k...->i...")],
    *[(e, [(2, 3, 4, 5), (4,)]) for e in ("...kl,k", "...kl,k...")],
    *[(e, [(1, 1, 1, 4, 5, 3), (4, 5, 3, 2)]) for e in ("...lmn,...lmno->...o", "...lmn,lmno->...o")],
    *[("ijk,kl,jl", [(1, 5, 4), (4, 6), (5, 6)]), ("ijk,kl,jl,i->i", [(1, 5, 4), (4, 6), (5, 6), (6,)])],
    *[("abjk,kl,jl", [(1, 1, 5, 4), (4, 6), (5, 6)]), ("abjk,kl,jl,ab->ab", [(1, 1, 5, 4), (4, 6), (5, 6), (3, 3)])],
    *[("...ft,mf->...mt", [(2, 3, 5), (4, 3)]), ("ijp,ipq,ikq->ijk", [(3, 1, 1), (3, 1, 3), (1, 3, 3)])],
    ("jhcabhijaci,dfijejgh->fgje", [(1, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1), (3, 1, 3, 1, 1, 1, 1, 2)]),
    ("baegffahgc,hdggeff->dhg", [(2, 1, 4, 1, 1, 1, 1, 2, 1, 1), (1, 1, 1, 1, 4, 1, 1)]),
    ("cehgbaifff,fhhdegih->cdghbi", [(1,) * 10, (2, 1, 1, 2, 4, 1, 1, 1)]),
    ("gah,cdbcghefg->ef", [(2, 3, 1), (1, 3, 1, 1, 1, 2, 1, 4, 1)]),
    ("cacc,bcb->", [(1, 1, 1, 1), (1, 4, 1)]),
]
LISTS: list[tuple[list[tuple[int, ...]], list[Any], list[Any] | None]] = [
    ([(3, 4)], [[...]], None),
    ([(3, 4)], [[1, 0]], None),
    ([(3, 3)], [[0, 0]], [0]),
    ([(3, 3)], [[0, 0]], None),
    ([(4, 3, 3)], [[..., 0, 0]], [..., 0]),
    ([(3, 4, 3)], [[0, ..., 0]], [..., 0]),
    ([(4, 3, 3)], [[1, 0, 0]], [0, 1]),
    ([(3, 4)], [[..., 0]], [...]),
    ([(3, 4), (4, 2)], [[0, 1], [1, 2]], None),
    ([(3, 4), (4, 2)], [[0, 51], [51, 2]], [0, 2]),
    ([(3, 4, 2), (4, 3, 5)], [[0, 1, 2], [1, 0, 3]], [2, 3]),
    ([(3, 4), (4, 2), (2, 5)], [[0, 1], [1, 2], [2, 3]], None),
    ([(2, 3, 4), (4,)], [[..., 0], [..., 0]], None),
    ([(), (3,)], [[], [0]], []),
]


@pytest.mark.parametrize("part", range(4))
def test_expressions_of_numpys_tests(grids: list[Any], part: int) -> None:
    shaped = SHAPED + [(e, [tuple(EXTENTS[x] for x in y) for y in e.split("->")[0].split(",")]) for e in PLAIN.split()]
    for turn, (expression, shapes) in enumerate(shaped[part::4]):
        if grids[0].comm.size > 2 and not tiers.everything() and turn % 4:
            continue
        draw = random.Random(turn)
        grid = grids[turn % len(grids)]
        arrays = [elements(shape, "float64", 10 * turn + at) for at, shape in enumerate(shapes)]
        result = pdgemm.einsum(expression, *(tensor_of(x, grid, draw) for x in arrays))
        expected = np.asarray(np.einsum(expression, *arrays, optimize=True))
        magnitude = np.asarray(np.einsum(expression, *map(abs, arrays), optimize=True))
        compare(result, expected, magnitude, 10000, np.dtype(float))


def test_lists_of_axes_and_tensordot(grids: list[Any]) -> None:
    draw = random.Random(1)
    for shapes, inputs, output in LISTS:
        grid, arrays = draw.choice(grids), [elements(shape, "float64", at) for at, shape in enumerate(shapes)]
        tensors = [tensor_of(x, grid, draw) for x in arrays]
        ends = [] if output is None else [output]
        mine, numpys = ([y for pair in zip(x, inputs) for y in pair] + ends for x in (tensors, arrays))
        compare(pdgemm.einsum(*mine), np.asarray(np.einsum(*numpys)), 10.0, 100, np.dtype(float))
    cases: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = [
        *[((2, 3, 4), (3, 2, 5), x) for x in (([1, 0], [0, 1]), ((0, 1), (1, 0)), ([-2, -3], [0, 1]), ([0], [1]))],
        *[((2, 3), (2, 3, 5), (0, 0)), ((3, 3), (3, 3, 2, 2), (0, 0)), ((3, 0), (0, 4), (1, 0)), ((3, 0), (0, 4), 1)],
        *[((), (), ([], [])), ((2, 3), (4,), 0), ((2, 3), (2, 3), 2), ((2, 3), (2, 3), [(0, 1), (0, 1)])],
        *[((4, 3, 2), (3, 2), 2), ((4, 3), (3,), 1), ((2, 3, 4), (4, 3, 5), ((2, 1), (0, 1)))],
    ]
    for a, b, axes in cases:
        grid, x, y = draw.choice(grids), elements(a, "float64"), elements(b, "float64", 1)
        X, Y = tensor_of(x, grid, draw), tensor_of(y, grid, draw)
        for result in (pdgemm.tensordot(X, Y, axes), np.tensordot(X, y, axes), np.tensordot(x, Y, axes=axes)):
            compare(result, np.asarray(np.tensordot(x, y, axes)), 10.0, 100, np.dtype(float))


@pytest.mark.on_ranks(2, 3)
def test_bad_contractions_raise_the_same_error_on_all_ranks(comm: Any, grids: list[Any]) -> None:
    for grid in grids:
        A, B, whole = (DistTensor.from_global(np.ones(x), grid=grid) for x in ((2, 3), (3, 4), (2, 2)))
        truths = DistTensor.from_global(np.ones((3, 3), bool), grid=grid)

        calls: dict[str, tuple[type, Any]] = {
            "einsum ij,kj->ik: index 'j' has the extents 3 and 4": (
                LayoutError,
                partial(pdgemm.einsum, "ij,kj->ik", A, B),
            ),
            "'ijk' names 3 axes of an operand of": (LayoutError, partial(pdgemm.einsum, "ijk->i", A)),
            "index 'i' of one operand has the extents 2 and 3": (LayoutError, partial(pdgemm.einsum, "ii->i", A)),
            "einsum 'ij->x' of shapes": (ArgumentError, partial(pdgemm.einsum, "ij->x", A)),
            "einsum 'ij,jk->ik' of shapes": (ArgumentError, partial(pdgemm.einsum, "ij,jk->ik", A)),
            "einsum ij,jk->ik: index 'k' has the extents 4 and 2, of out": (
                LayoutError,
                partial(pdgemm.einsum, "ij,jk->ik", A, B, out=whole),
            ),
            "einsum ij->i: the result has 1 axes, and out the shape (2, 2)": (
                LayoutError,
                partial(pdgemm.einsum, "ij->i", A, out=whole),
            ),
            "einsum ij->ij: out is a DistMatrix, and not a DistTensor": (
                TypeError,
                partial(pdgemm.einsum, "ij->ij", A, out=A.matrix([0])),
            ),
            "einsum ij,kj->ik: the result is float64, and out int64": (
                DTypeError,
                partial(pdgemm.einsum, "ij,kj->ik", A, A, out=whole.astype(int)),
            ),
            "elements of bool are not multiplied": (DTypeError, partial(pdgemm.einsum, "ij,jk->ik", truths, truths)),
            "alpha = 1j is complex, but the result is float64": (
                DTypeError,
                partial(pdgemm.einsum, "ij,jk->ik", A, B, alpha=1j),
            ),
            "beta = 1j is complex, but the result is float64": (
                DTypeError,
                partial(pdgemm.einsum, "ij->ij", A, out=A, beta=1j),
            ),
            "alpha must be a number, got str": (DTypeError, partial(pdgemm.einsum, "ij,jk->ik", A, B, alpha="2")),
            "memory limit 1 bytes per rank is too small": (
                MemoryLimitError,
                partial(pdgemm.einsum, "ij,jk->ik", A, B, memory_limit=1),
            ),
            "called with different arguments": (
                ArgumentError,
                partial(pdgemm.einsum, "ij,jk->ik", A, B, alpha=float(comm.rank)),
            ),
            "the plan was made for": (
                LayoutError,
                partial(pdgemm.einsum, "ij->ji", A, optimize=pdgemm.plan_einsum("ij->ij", A)),
            ),
            "got axes (1,) of shape (2, 3) and (1,) of shape (3, 4), of extents 3 and 4": (
                LayoutError,
                partial(pdgemm.tensordot, A, B, ((1,), (1,))),
            ),
            "got axes (0, 1) of shape (2, 3) and": (LayoutError, partial(pdgemm.tensordot, A, B, ((0, 1), (0,)))),
            "got axes (1,) of shape (2, 3) and (0,) of shape (1, 4)": (
                LayoutError,
                partial(pdgemm.tensordot, A, np.ones((1, 4)), 1),
            ),
        }
        for message, (kind, wrong) in calls.items():
            with pytest.raises(kind, match=re.escape(message)) as error:
                wrong()
            assert len({*comm.allgather(str(error.value))}) == 1


@pytest.mark.on_ranks(2)
def test_kinds_of_numbers_are_combined_as_in_numpy(comm: Any, grid: Any) -> None:
    real, complexes = elements((3, 4), "float64"), elements((4, 2), "complex64", 1)
    number = np.array(2 + 1j)
    R, X, N = (DistTensor.from_global(x, grid=grid) for x in (real, complexes, number))
    for expression, mine, arrays in (
        ("ij,jk->ik", (R, X), (real, complexes)),
        (",ij->ij", (N, R), (number, real)),
        ("ij,,jk->ki", (R, N, R.T), (real, number, real.T)),
        (",->", (N, N), (number, number)),
    ):
        result = pdgemm.einsum(expression, *mine)
        expected = np.einsum(expression, *arrays)
        assert result.dtype == expected.dtype
        compare(result, np.asarray(expected), 100.0, 20, np.dtype(expected.dtype))


def test_out_shares_no_memory_with_an_operand(grids: list[Any]) -> None:
    T = DistTensor.random((4, 4), grid=grids[0], seed=1)
    before = T.allgather()
    for expression, *operands in (("ij,jk->ik", T, T), ("ij->ji", T), ("ij,ij->ij", T, T)):
        with pytest.raises(ArgumentError, match="out shares memory with operand 1"):
            pdgemm.einsum(expression, *operands, out=T)
    assert np.array_equal(T.allgather(), before)


def test_words_of_a_conjugated_matrix(grids: list[Any]) -> None:
    """A conjugate is a private copy, which is copied to where other ranks read it, as the plan of a move says."""
    y = elements((18, 1), "complex128", 1)
    for grid in grids:
        T = DistMatrix.from_global(y, grid=grid, block=6).H.tensor((3, 3, 2))
        target = TensorLayout.even(T.shape, (1,), (0, 2), (len(grid.members), 1), grid.members)
        moved = in_layout(T, target)
        assert np.array_equal(moved.allgather(), y.conj().T.reshape(3, 3, 2))
        plan = Resources(grid.size, machine_of(grid), None, grid.members).move(T.layout, target, T.dtype)
        assert plan is None or moved.report.counted == plan.traffic(grid.comm.rank)


def test_words_of_operands_in_private_memory(grids: list[Any]) -> None:
    """Copies are outside of node-shared memory; where a product moves them, they are copied there, as its plan says."""
    layouts: list[Any] = [((0, 1), ()), ((), (1, 0)), ((0,), (1,))]
    for grid in grids:
        for m, k, n in ((3, 2, 1), (2, 9, 3)):
            a, b = elements((m, k), "complex128"), elements((k, n), "complex128", 1)
            for (here, there), dims in itertools.product(itertools.product(layouts, repeat=2), (1, 2)):
                A, B = (
                    DistTensor.from_global(x, grid=grid, rows=x_rows, cols=x_cols).copy()
                    for x, (x_rows, x_cols) in ((a, here), (b, there))
                )
                checked("ij,jk->ik" if dims == 2 else "ij,jk->i", [a, b], [A, B], grid)
