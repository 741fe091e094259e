"""Problems with random grids, layouts, views, types, scalars and options, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drawn_problems import check_outside, draw_side
from hypothesis import HealthCheck, given, settings, strategies as st
from problems import FLOATS, accepted
from tiers import every_grid, examples
from tree_mover import ON_HOST

from pdgemm import pdgemm
from pdgemm.errors import MemoryLimitError
from pdgemm.local.arrays.dtypes import eps, kind_rank
from pdgemm.local.arrays.emulation import EMULATIONS
from pdgemm.support import launcher

pytestmark = [pytest.mark.mpi, every_grid]

RANKS = launcher.launched_size()
EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2"]
BROADCAST = [x for x in accepted(RANKS) if x[0] == "summa"]  # drawn more often: mover and lookahead matter most
CASES = examples({1: 120, 2: 100, 3: 40, 4: 40}.get(RANKS, 24))
NODES = [None, "1", "2"][:RANKS]  # ranks of a node, at most all ranks


@pytest.mark.parametrize("grids_on_nodes", NODES, indirect=True)
@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_product(
    comm: Any, grids_on_nodes: list[Any], tree_mover: None, allgather_3d: None, data: st.DataObject
) -> None:
    draw = data.draw
    m, n, k = (draw(st.integers(0, 20)) for _ in "mnk")
    pool = draw(st.sampled_from([["int8"], ["float16", *FLOATS[2:5]], ["bfloat16", "float32"], FLOATS[2:], EIGHT_BITS]))
    A = draw_side(draw, grids_on_nodes, (m, k), pool, "NTC", 1)
    B = draw_side(draw, grids_on_nodes, (k, n), pool, "NTC", 2)
    least = max(kind_rank(A.view.dtype), kind_rank(B.view.dtype))
    results = ["int32", *FLOATS[1:]] if pool == ["int8"] else FLOATS  # no float16: 128 * 128 * 20 overflows
    C = draw_side(draw, grids_on_nodes, (m, n), [x for x in results if kind_rank(np.dtype(x)) >= least], "NT", 3)
    scalars = (
        [0, 1, -2, 2**31 if kind_rank(C.view.dtype) == 0 else 3]
        + [0.5] * (kind_rank(C.view.dtype) > 0)
        + [1 + 2j] * (kind_rank(C.view.dtype) > 1)
    )
    alpha, beta = draw(st.sampled_from(scalars)), draw(st.sampled_from(scalars))
    c0 = C.values().astype(np.result_type(C.view.dtype, np.float64) if kind_rank(C.view.dtype) else np.int64)
    if beta == 0 and kind_rank(C.view.dtype):
        C.view.local[...] = np.nan
    forced: Any = draw(st.sampled_from([("auto", None, None)] * 2 + accepted(RANKS) + BROADCAST))
    algorithm, shape, layers = forced
    sharing = RANKS == 1 or len({*grids_on_nodes[0].nodes}) < RANKS  # are there two ranks on a node?
    if algorithm != "auto" and draw(st.booleans()):
        shape = layers = None
    asked = {
        "algorithm": algorithm,
        "shape": shape,
        "layers": layers,
        "mover": draw(st.sampled_from(["auto", *(x for x in ON_HOST if x != "shared" or sharing)])),
        "lookahead": draw(st.integers(0, 5)),
        "panel_width": draw(st.none() | st.integers(1, 8)),
        "accumulate_dtype": draw(
            st.none() | st.sampled_from([["int32"], FLOATS[2:4], FLOATS[4:]][kind_rank(C.view.dtype)])
        ),
    }
    if asked["accumulate_dtype"] is None and kind_rank(C.view.dtype):
        asked["compute_type"] = draw(st.none() | st.sampled_from(["ozaki", "ozaki-4", "bf16x9"]))
    limit = draw(st.none() | st.integers(500, 50_000))
    try:
        result = pdgemm(alpha, A.view, B.view, beta, C.view, memory_limit=limit, **asked)
    except MemoryLimitError as refused:
        limit = int(str(refused).split("at least ")[1].split()[0])
        result = pdgemm(alpha, A.view, B.view, beta, C.view, memory_limit=limit, **asked)
    assert limit is None or result.report.extra_bytes <= limit

    assert result is C.view
    report = result.report
    assert report.counted == report.predicted, str(report)
    assert report.extra_bytes == report.predicted_extra_bytes, str(report)
    if algorithm not in ("auto", "row", "column") and k and alpha:
        assert report.algorithm == algorithm
    if shape and k and alpha:
        assert (report.grid, report.layers) == (shape, layers)
    wide = np.result_type(C.view.dtype, np.float64)
    exact = kind_rank(C.view.dtype) == 0
    a, b = (x.values().astype(np.int64 if exact else np.result_type(x.view.dtype, np.float64)) for x in (A, B))
    expected = alpha * (a @ b) + (beta * c0 if beta else 0)
    if exact:  # modulo 2^32
        expected = np.asarray(expected).astype(np.int32)
    size = abs(alpha) * (np.abs(a) @ np.abs(b)) + abs(beta) * np.abs(c0)
    bound = ((k + 4) * eps(np.dtype(report.dtype)) * 4 + 2 * eps(C.view.dtype)) * size
    if how := EMULATIONS.get(asked.get("compute_type") or ""):
        largest = np.abs(a).max(axis=1, keepdims=True, initial=0) * np.abs(b).max(axis=0, keepdims=True, initial=0)
        bound += 3 * k * abs(alpha) * how.error * largest
    here = np.ix_(*C.view.indices())
    error = np.abs(C.view.local.astype(wide) - expected[here])
    assert (error <= bound[here]).all(), f"{error.max()} {report}"
    for side in (A, B, C):
        check_outside(side)
    for side in (A, B):
        assert np.array_equal(side.parent.local, side.before[np.ix_(*side.parent.indices())])


@pytest.mark.parametrize("grids_on_nodes", NODES, indirect=True)
@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_redistribution(comm: Any, grids_on_nodes: list[Any], data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    X = draw_side(draw, grids_on_nodes, shape, ["int8", *FLOATS], "NTC", 1)
    targets = [x for x in ["int8", *FLOATS] if kind_rank(np.dtype(x)) >= kind_rank(X.view.dtype)]
    mixed = {"float16": "bfloat16", "bfloat16": "float16"}
    Y = draw_side(draw, grids_on_nodes, shape, [x for x in targets if mixed.get(x) != str(X.view.dtype)], "NT", 2)
    scalars = [0, 1, 1, 1, -2] + [0.5] * (kind_rank(Y.view.dtype) > 0) + [2j] * (kind_rank(Y.view.dtype) > 1)
    alpha, beta = draw(st.sampled_from(scalars)), draw(st.sampled_from([0, 0, *scalars]))
    wide = np.result_type(Y.view.dtype, np.float64) if kind_rank(Y.view.dtype) else np.dtype(np.int64)
    x, y = X.values().astype(np.result_type(wide, X.view.dtype)), Y.values().astype(wide)
    if beta == 0 and kind_rank(Y.view.dtype):
        Y.view.local[...] = np.nan
    limit = draw(st.none() | st.integers(200, 5000))
    out = X.view.redistribute(Y.view, alpha=alpha, beta=beta, memory_limit=limit)
    assert out is Y.view
    report = out.report
    here, had = np.zeros((2, *shape), bool)
    here[np.ix_(*Y.view.indices())] = had[np.ix_(*X.view.indices())] = True
    by_nodes = X.view.grid.ranks_per_node is not None and comm.allreduce(report.counted.words_read)
    assert not alpha or by_nodes or report.counted.words_received == (here & ~had).sum()  # elements of other ranks
    assert report.counted == report.predicted, str(report)
    assert report.extra_bytes == report.predicted_extra_bytes
    assert limit is None or report.extra_bytes <= limit
    expected = alpha * x + beta * y
    here = np.ix_(*Y.view.indices())
    if kind_rank(Y.view.dtype) == 0:
        assert np.array_equal(Y.view.local, expected.astype(np.int8)[here])
    elif alpha == 1 and beta == 0:
        assert np.array_equal(Y.view.local, expected.astype(Y.view.dtype)[here])
    else:
        bound = (
            4
            * max(eps(X.view.dtype) * (kind_rank(X.view.dtype) > 0), eps(Y.view.dtype))
            * (abs(alpha * x) + abs(beta * y))
        )
        assert (np.abs(Y.view.local.astype(wide) - expected[here]) <= bound[here]).all()
    check_outside(X)
    check_outside(Y)
    assert np.array_equal(X.parent.local, X.before[np.ix_(*X.parent.indices())])
