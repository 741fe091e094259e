"""Type checks of users' scripts: no errors in a correct script, and an error in each line with a mistake."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiers import thorough

from pdgemm import DistMatrix, redistribute

RIGHT = """
from typing import assert_type

import ml_dtypes
import numpy as np
from mpi4py import MPI

from pdgemm import Batch, DistMatrix, Plan, ProcessGrid, matmul, matmul_batched, pdgemm, plan, redistribute, verify
from pdgemm.io import hdf5
from pdgemm.schedules.mover_registry import Mover
from pdgemm.transport.movers import register_mover
from pdgemm.transport.movers.ring import ring
from pdgemm.names import AlgorithmName, AnyName

grid = ProcessGrid(MPI.COMM_WORLD)
A = DistMatrix.random((60, 50), grid=grid, block=(8, 9), dtype="float32", source=(0, 0), order="F", seed=3)
B = DistMatrix.from_function(lambda i, j: i - j, (50, 40), grid=grid, block=16, dtype=np.float64, device="host")
Z = DistMatrix.zeros((3, 4), grid=grid, dtype=ml_dtypes.bfloat16)
G = DistMatrix.from_global(np.ones((3, 4)), grid=grid, order="F", device=A.device)

C = pdgemm(1.0, A, B)
assert_type(C, DistMatrix)
assert_type(C.report.gflops, float)
assert_type(C.report.counted.words_received, int)
print(C.report, C.report.summary().as_dict()["gflops"])
again = pdgemm(2, A, A, 0, transa="T", transb="n", algorithm=C.report.algorithm, mover="ring", compute_type="float16")
assert_type(plan(A, B, algorithm="2.5d", accumulate_dtype="float64"), Plan)
assert_type(matmul(A, B), DistMatrix)
assert_type(verify(C, 1.0, A, B).passed, bool)
D = redistribute(C, block=3, order="F")
assert_type(D.report.counted.words_sent, int)
assert_type(C.redistribute(like=D).report.target, str)
X = hdf5.load("x.h5", "/x", grid, dtype="float64", device="host")
print(X.report.checksum)
hdf5.save("x.h5", "/x", X, replaces=X.report)


def fastest(algorithms: list[AlgorithmName]) -> AlgorithmName:
    return min(algorithms, key=lambda name: plan(A, B, algorithm=name).seconds)


fastest(["summa", "cannon"])
tree = register_mover(Mover("tree", "a tree", "messages"), ring)
pdgemm(1, A, B, mover=tree, algorithm=AnyName("mine"))

assert_type(A @ B, DistMatrix)
assert_type(2 * A, DistMatrix)
assert_type(A + A, DistMatrix)
assert_type(-A / 3 - 1, DistMatrix)
assert_type((A > 0) & (A != 1), DistMatrix)
assert_type(A.T, DistMatrix)
assert_type(A.conj(), DistMatrix)
assert_type(A[0:2, :], DistMatrix)
assert_type(A[0], np.ndarray)
A *= 2
A[0:2, 0:3] = 0

column: DistMatrix = A.mean(axis=1, keepdims=True)
assert_type(A - column, DistMatrix)
assert_type(A.sum(axis=0), np.ndarray)
assert_type(A.std(axis=0, ddof=1), np.ndarray)
assert_type(A.var(keepdims=True), DistMatrix)
assert_type(A.argmax(), np.intp)
assert_type(A.norm(), float)
assert_type(A.norm(axis=0), np.ndarray)
total: float = A.sum()
print(np.sum(A, axis=0), np.linalg.norm(A), np.sqrt(A), np.where(A > 0, A, 0))

batch = Batch.from_local(np.ones((5, 3, 3)), MPI.COMM_WORLD)
assert_type(matmul_batched(batch, batch, transa="C").report.imbalance, float)
"""

MISTAKES = """
import numpy as np
from mpi4py import MPI

from pdgemm import Batch, DistMatrix, ProcessGrid, matmul_batched, pdgemm, plan, redistribute, verify
from pdgemm.io import hdf5

grid = ProcessGrid(MPI.COMM_WORLD)
A = DistMatrix.zeros((6, 6), grid=grid)
C = pdgemm(1, A, A)
batch = Batch.from_local(np.ones((5, 3, 3)), MPI.COMM_WORLD)

pdgemm(1, A, A, algorithm="summma")  # wrong
pdgemm(1, A, A, mover="shard")  # wrong
pdgemm(1, A, A, transa="X")  # wrong
pdgemm(1, A, A, compute_type="bf16")  # wrong
pdgemm(1, A)  # wrong
plan(A, A, algorithm="summma")  # wrong
matmul_batched(batch, batch, transb="X")  # wrong
verify(C, 1, A, A, compute_type="bf16")  # wrong
redistribute(A, order="R")  # wrong
A.redistribute(blok=3)  # wrong
hdf5.load("x.h5", "/x", grid, dtype="flaot32")  # wrong
DistMatrix.empty((6, 6), grid=grid, blok=3)  # wrong
DistMatrix.eye(6, grid=grid, ordr="F")  # wrong
DistMatrix.random((6, 6), grid=grid, kind="norml")  # wrong
DistMatrix.from_function(lambda i, j: i, (6, 6), grid=grid, order="R")  # wrong
DistMatrix.from_global(np.ones((6, 6)), grid=grid, device="gpu")  # wrong
A.to_device("gpu")  # wrong
A.astype("flaot32")  # wrong
A.sum(axs=0)  # wrong
A.sum(axis=0).local  # wrong
A.norm("frob")  # wrong
C.report.glops  # wrong
A.shap  # wrong
"""


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(function).parameters)
    del found[next(iter(found))]  # without the first, the matrix or its shape
    return found


def test_arguments_have_names_of_their_own_and_the_same_defaults_everywhere() -> None:
    layout = parameters(DistMatrix.empty)
    assert [*layout] == ["grid", "block", "dtype", "source", "order", "device"]
    for constructor in (DistMatrix.zeros, DistMatrix.eye, DistMatrix.random, DistMatrix.from_function):
        assert layout.items() <= parameters(constructor).items()
        f = [lambda i, j: i] if constructor == DistMatrix.from_function else []
        with pytest.raises(TypeError, match="unexpected keyword argument 'blok'"):
            constructor(*f, (3, 4), grid=None, blok=3)  # type: ignore[call-overload]
    assert layout.items() - {("dtype", layout["dtype"])} <= parameters(DistMatrix.from_global).items()
    assert parameters(DistMatrix.redistribute) == parameters(redistribute)


WRONG = [number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# wrong")]


def run(folder: Path, *command: str) -> str:
    """Run a type checker on both scripts; return its messages."""
    (folder / "right.py").write_text(RIGHT)
    (folder / "mistakes.py").write_text(MISTAKES)
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False, timeout=110
    )
    assert not done.stderr, done.stderr
    return done.stdout


def test_mypy_finds_the_mistakes_of_a_script_and_no_others(tmp_path: Path) -> None:
    kept = f"--cache-dir={Path(__file__).parents[2] / '.mypy_cache/scripts of users'}"  # else it takes eight seconds
    options = ("--strict", "--no-error-summary", "--hide-error-context", kept)
    said = run(tmp_path, "mypy", *options, "right.py", "mistakes.py")
    found = re.findall(r"^(\w+\.py):(\d+): error", said, re.MULTILINE)
    assert [(name, line) for name, line in found if name == "right.py"] == [], said
    assert sorted({int(line) for _, line in found}) == WRONG, said


@thorough
@pytest.mark.skipif(find_spec("basedpyright") is None, reason="pyright is not installed")
def test_pyright_finds_them_as_well(tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    said = run(tmp_path, "basedpyright", "--outputjson", "--pythonpath", sys.executable, "right.py", "mistakes.py")
    errors = [x for x in json.loads(said)["generalDiagnostics"] if x["severity"] == "error"]
    assert [x for x in errors if x["file"].endswith("right.py")] == []
    assert sorted({x["range"]["start"]["line"] + 1 for x in errors}) == WRONG
