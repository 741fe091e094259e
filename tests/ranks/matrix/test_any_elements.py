"""Reductions and elementwise operations with random grids, layouts, views, types and shapes, compared with NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from drawn_problems import check_outside, draw_side
from hypothesis import HealthCheck, given, settings, strategies as st
from tiers import every_grid, examples

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.dtypes import eps
from pdgemm.support import launcher

pytestmark = [pytest.mark.mpi, every_grid]

RANKS = launcher.launched_size()
CASES = examples(60 if RANKS <= 2 else 30 if RANKS <= 4 else 15)
TYPES = ["int8", "int32", "float16", "float32", "float64", "complex64", "complex128"]
EXACT = ["min", "max", "argmin", "argmax", "any", "all"]


@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_reduction(comm: Any, grids_on_nodes: list[Any], data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    A = draw_side(draw, grids_on_nodes, shape, TYPES, "NTC", 1)
    name = draw(st.sampled_from([*EXACT, "sum", "mean", "prod", "std", "var", "vector_norm"]))
    axis, x = draw(st.sampled_from([None, 0, 1, -1])), A.values()
    if name in ("min", "max", "argmin", "argmax") and not (x.size if axis is None else shape[axis]):
        with pytest.raises(ArgumentError, match="of no element"):
            getattr(A.view, name)(axis)
        return
    kept = getattr(A.view, name)(axis=axis, keepdims=True)
    found = np.asarray(getattr(A.view, name)(axis=axis))
    assert np.array_equal(kept.allgather().ravel(), found.ravel(), equal_nan=found.dtype.kind in "fc")
    assert kept.report.counted == kept.report.predicted
    check_outside(A)
    function = np.linalg.vector_norm if name == "vector_norm" else getattr(np, name)
    wide = x.astype(np.result_type(x.dtype, np.float64)) if x.dtype.kind in "fc" else x
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        expected = np.asarray(function(x if name in EXACT else wide, axis=axis))
    assert found.shape == expected.shape
    if name in EXACT or expected.dtype.kind in "biu":
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected), (name, axis)
        return
    scale = np.abs(wide).sum() if name == "sum" else max(1.0, float(np.abs(wide).max(initial=0))) ** 2
    # eps of x for norms, which are Python numbers
    unit = max(eps(found.dtype), eps(x.dtype) if x.dtype.kind == "c" else 0)
    error = 20 * max(unit, 1e-15) * max(1.0, float(scale))
    relative = (10 + x.size * (name == "prod")) * unit
    expected = expected.astype(found.dtype).astype(expected.dtype)  # overflow as in the result's type
    assert np.allclose(found.astype(expected.dtype), expected, rtol=relative, atol=error, equal_nan=True)


@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_elementwise_operation(comm: Any, grids_on_nodes: list[Any], data: st.DataObject) -> None:
    draw = data.draw
    m, n = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    function = draw(st.sampled_from([np.add, np.subtract, np.multiply, np.divide, np.maximum, np.less, np.equal]))
    A = draw_side(draw, grids_on_nodes, (m, n), TYPES, "NTC", 1)
    kind = draw(st.sampled_from(["matrix", "row", "column", "number", "vector", "scalar"]))
    other: Any
    if kind in ("vector", "scalar"):
        values = np.arange(n, dtype=draw(st.sampled_from(TYPES))) if kind == "vector" else np.int8(3)
        other, whole = values, values
    else:
        shape = {"matrix": (m, n), "row": (1, n), "column": (m, 1), "number": (1, 1)}[kind]
        B = draw_side(draw, grids_on_nodes, shape, TYPES, "NTC", 2)
        other, whole = B.view, B.values()
    turned = draw(st.booleans())
    left, right = (other, A.view) if turned else (A.view, other)
    with np.errstate(all="ignore"):
        expected = function(whole, A.values()) if turned else function(A.values(), whole)
        found = function(left, right)
    assert found.dtype == expected.dtype
    assert np.array_equal(found.allgather(), expected, equal_nan=expected.dtype.kind in "fc")
    if kind != "matrix" and (m, n) != (1, 1) and whole.shape != expected.shape:
        assert found.same_layout(A.view)
    check_outside(A)
