"""Checks of commands (`--verify`): a planted fault is WRONG or undecidable, with the documented exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from flips import changed_after_the_product, larger

from pdgemm import DistMatrix, linalg
from pdgemm.io.streamed import einsum_files, stored_svd
from pdgemm.tools.cli.commands import cli
from pdgemm.tools.cli.linalg_checks import TELLS, Check

pytestmark = pytest.mark.mpi
Words = tuple[str, ...]
IN_PARTS = "--checkpoint", "1h"


@pytest.fixture
def folder(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a.h5: Hermitian, nearly Hermitian and general matrices, of low rank, ill-conditioned or invalid."""
    monkeypatch.chdir(shared_tmp_path)
    rng = np.random.default_rng(5)
    x, tall = rng.standard_normal((24, 24)), rng.standard_normal((40, 12))
    q, v = np.linalg.qr(tall)[0], np.linalg.qr(rng.standard_normal((12, 12)))[0]
    if comm.rank == 0:
        with h5py.File("a.h5", "w") as file:
            file["x"], file["her"], file["pos"] = x, x + x.T, x @ x.T + np.eye(24)
            file["lopsided"] = file["pos"][()] + np.triu(x, 1)
            file["skew"] = np.tril(x) - np.tril(x, -1).T  # |A|_F and trace equal those of its lower triangle, mirrored
            file["half"] = np.tril(file["pos"][()])
            file["tall"], file["b"], file["ill"] = tall, rng.standard_normal((24, 3)), q * np.logspace(0, -8, 12) @ v
            file["right"], file["few"] = rng.standard_normal((40, 3)), tall[:, :4] @ rng.standard_normal((4, 12))
            file["nan"], file["huge"] = np.where(np.eye(24) == 1, np.nan, x), x * 1e307
    comm.Barrier()
    return shared_tmp_path


def pdgemm(comm: Any, *words: str) -> tuple[int, str]:
    """Run a command on all ranks of the test; return its exit code, and the output of rank 0."""
    comm.Barrier()
    run = CliRunner().invoke(cli, [*words], standalone_mode=False)
    assert run.exception is None, run.exception
    code: int = run.return_value or 0
    assert comm.allgather(code) == [code] * comm.size
    return comm.bcast((code, run.output))


def changed(at: int | None = None) -> Callable[[Any], Any]:
    """Return a function that changes one element of a result, or of member `at` of a tuple of results."""

    def change(out: Any) -> Any:
        x = (out if at is None else out[at]).copy()
        if isinstance(x, np.ndarray):
            x[len(x) // 2] += 1e-3
        else:
            x[1:2, 0:1] = x[1:2, 0:1] + 1e-3
        return x if at is None else (*out[:at], x, *out[at + 1 :])

    return change


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a function of `linalg`, or `stored_svd`, by one that changes its result and keeps the report."""
    module: Any = stored_svd if name == "stored_svd" else linalg
    right = getattr(module, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        out = right(*arguments, **options)
        spoilt = change(out)
        for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (out, spoilt)), strict=True):
            if hasattr(x, "later_report"):
                y.report = x.report
        return spoilt

    monkeypatch.setattr(module, name, wrong)


def opposite(out: Any) -> Any:
    """Change the signs of a singular value and of its vector: A V = U diag(s) still holds."""
    U, s, Vh = out
    signs = np.where(np.arange(len(s)) == 1, -1.0, 1.0)
    return U * signs, s * signs, Vh


def along(of: str, which: int) -> Callable[[Any], Any]:
    """Return a function that adds to X the right singular vector `which` of dataset `of`; A maps it nearly to zero."""

    def change(out: Any) -> Any:
        with h5py.File("a.h5") as file:
            v = np.linalg.svd(file[of][()])[2][which]
        X, size = out[0], 0.1 * out[0].norm()
        return (X + DistMatrix.from_function(lambda i, j: size * v[i] + 0 * j, X.shape, grid=X.grid), *out[1:])

    return change


IN_FILE = ("svd", "a.h5:/tall", "--memory", "4MiB", "-k")
WRONG: dict[str, tuple[Words, str, Callable[[Any], Any]]] = {
    "gram: an element of G": (("gram", "a.h5:/tall"), "gram", changed()),
    "solve: an element of X": (("solve", "a.h5:/x", "a.h5:/b"), "solve", changed()),
    "eigh: an element of V": (("eigh", "a.h5:/her"), "eigh", changed(1)),
    "eigh: a value": (("eigh", "a.h5:/her"), "eigh", changed(0)),
    "eigh --values: a value": (("eigh", "a.h5:/her", "--values"), "eigvalsh", changed()),
    "eigh --values: the order": (("eigh", "a.h5:/her", "--values"), "eigvalsh", lambda w: w[::-1].copy()),
    "svd: an element of U": (("svd", "a.h5:/tall"), "svd", changed(0)),
    "svd: a value": (("svd", "a.h5:/tall"), "svd", changed(1)),
    "svd: an element of Vh": (("svd", "a.h5:/tall", "-k", "3"), "svd", changed(2)),
    "svd: two signs": (("svd", "a.h5:/tall"), "svd", opposite),
    "svd: the largest value is left out": (
        ("svd", "a.h5:/tall", "-k", "3"), "svd", lambda out: (out[0][:, 1:], out[1][1:], out[2][1:]),
    ),
    "svd --memory: an element of U": ((*IN_FILE, "3"), "stored_svd", changed(0)),
    "svd --memory: a value": ((*IN_FILE, "3"), "stored_svd", changed(1)),
    "svd --memory: the largest value is left out": (
        (*IN_FILE, "3"), "stored_svd", lambda out: (out[0][:, 1:], out[1][1:], out[2][1:], None),
    ),
    "lstsq: an element of X": (("lstsq", "a.h5:/tall", "a.h5:/right"), "lstsq", changed(0)),
    "lstsq: X along the least singular vector": (("lstsq", "a.h5:/ill", "a.h5:/right"), "lstsq", along("ill", -1)),
    "lstsq: X is not of least norm": (("lstsq", "a.h5:/few", "a.h5:/right"), "lstsq", along("few", -1)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_results_of_linear_algebra(comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One check prints WRONG, and nothing is written; test_linalg_commands.py has correct results."""
    words, name, change = WRONG[case]
    planted(monkeypatch, name, change)
    code, said = pdgemm(comm, *words, *([] if "--values" in words else ["-o", "out.h5:/x"]), "--verify")
    assert code == 1 and said.count("WRONG") == 1 and not (folder / "out.h5").exists(), said


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("eigh", "a.h5:/lopsided"), "|Ah - A|"),
        (("eigh", "a.h5:/lopsided", "--upper"), "|Ah - A|"),
        (("eigh", "a.h5:/skew", "--values"), "|Ah - A|"),
        (("solve", "a.h5:/lopsided", "a.h5:/b", "--assume", "pos"), "|Ah - A|"),
        (("solve", "a.h5:/skew", "a.h5:/b", "--assume", "her"), "|Ah - A|"),
        (("solve", "a.h5:/x", "a.h5:/b", "--assume", "lower triangular"), "|A - its lower"),
        (("solve", "a.h5:/half", "a.h5:/b", "--assume", "upper triangular"), "|A - its upper"),
    ],
)
def test_matrices_other_than_those_in_the_file(comm: Any, folder: Path, words: Words, wrong: str) -> None:
    """If A lacks the assumed structure, --verify prints WRONG and writes nothing; otherwise only `eigh` warns."""
    words = (*words, "-o", "out.h5:/x")
    code, said = pdgemm(comm, *words, "--verify")
    assert code == 1 and f"{wrong} " in said and said.rstrip().endswith("WRONG"), said
    assert not (folder / "out.h5").exists()
    code, said = pdgemm(comm, *words)
    triangle = "upper" if "--upper" in words else "lower"
    assert code == 0 and (f"is not Hermitian: its {triangle} triangle is taken" in said) == (words[0] == "eigh"), said


def test_correct_results_are_ok(comm: Any, folder: Path) -> None:
    """Only one triangle of the Hermitian matrix is in the file; a least-squares problem is ill-conditioned."""
    for words in (
        "eigh a.h5:/half -o out.h5:/w",
        "solve a.h5:/half a.h5:/b -o out.h5:/x --assume pos",
        "lstsq a.h5:/ill a.h5:/right -o out.h5:/l",
    ):
        code, said = pdgemm(comm, *words.split(), "--verify")
        assert code == 0 and ": ok" in said and not re.search("WRONG|warning|cannot tell", said), said


def test_products(comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted after a product in memory; a correct product in parts; a file of C that is damaged later."""
    words = "multiply", "a.h5:/x", "a.h5:/pos", "-o", "c.h5:/c"
    with monkeypatch.context() as patch:
        changed_after_the_product(patch, larger)
        code, said = pdgemm(comm, *words, "--verify")
        assert code == 1 and "WRONG" in said and not (folder / "c.h5").exists(), said
    comm.Barrier()
    code, said = pdgemm(comm, *words, *IN_PARTS, "--verify")
    assert code == 0 and ": ok" in said, said
    check = "verify", "a.h5:/x", "a.h5:/pos", "c.h5:/c"
    assert pdgemm(comm, *check)[0] == 0
    comm.Barrier()
    if comm.rank == 0:
        with h5py.File("c.h5", "r+") as file:
            file["c"][3, 4] += 1e-6
    code, said = pdgemm(comm, *check)
    assert code == 1 and "WRONG" in said, said


def test_undecidable_results(comm: Any, folder: Path) -> None:
    """An undecidable result is stored with exit code 0, without `ok`; `verify` exits with 1."""
    verify = "verify", "a.h5:/x", "a.h5:/nan", "c.h5:/c"
    for words, expected in (
        (("multiply", "a.h5:/x", "a.h5:/nan", "-o", "c.h5:/c", "--verify"), 0),
        (verify, 1),
        (("solve", "a.h5:/huge", "a.h5:/b", "-o", "out.h5:/x", "--verify"), 0),  # |A|_1 overflows
    ):
        code, said = pdgemm(comm, *words)
        assert code == expected and "this check cannot tell" in said and ": ok" not in said, said
        if words[0] == "multiply":
            assert "24 of 24 rows of C hold NaN or infinity, which come from A and B; they are not compared" in said
    assert (folder / "c.h5").exists()
    facts = json.loads(pdgemm(comm, *verify, "--json")[1])["verify"]
    assert not facts["passed"] and not facts["wrong"]


def test_large_tolerances_and_overflowing_sizes_are_undecidable() -> None:
    for value, bound, passed, wrong in (
        (0.0, 1e-14, True, False), (0.05, TELLS, True, False), (0.33, 0.59, False, False), (0.0, np.inf, False, False),
        (0.6, 0.59, False, True), (np.nan, 1e-14, False, True), (np.nan, np.inf, False, False),
    ):  # fmt: skip
        check = Check("|A - U diag(s) Vh|_F", value, bound)
        assert (check.passed, check.wrong) == (passed, wrong)
        assert str(check).endswith(": ok" if passed else ": WRONG" if wrong else ": this check cannot tell")


def test_json_has_all_checks_and_the_least_verdict(comm: Any, folder: Path) -> None:
    code, said = pdgemm(comm, "eigh", "a.h5:/her", "-o", "out.h5:/x", "--verify", "--json")
    facts = json.loads(said)["verify"]
    assert code == 0 and facts["passed"] and len(facts["checks"]) == 5 and all(x["passed"] for x in facts["checks"])
    code, said = pdgemm(comm, "eigh", "a.h5:/skew", "--values", "--verify", "--json")
    facts = json.loads(said.splitlines()[-1])["verify"]  # standard error contains the warning
    assert code == 1 and facts["wrong"] and facts["what"] == "|Ah - A|"


def test_a_wrong_contraction_is_not_stored(comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contraction = "einsum", "ij,kj->ik", "a.h5:/x", "a.h5:/her", "-o", "c.h5:/r", "--verify"
    right = einsum_files.einsum

    def wrong(*arguments: Any, **options: Any) -> Any:
        C = right(*arguments, **options)
        C.local[:1, :1] += 1e-3
        return C

    with monkeypatch.context() as patched:
        patched.setattr(einsum_files, "einsum", wrong)
        code, said = pdgemm(comm, *contraction)
    assert code == 1 and "WRONG" in said and not Path("c.h5").exists()
    assert pdgemm(comm, *contraction)[0] == 0 and Path("c.h5").exists()
