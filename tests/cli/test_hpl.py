"""`pdgemm hpl`: the generator of the benchmarks HPL and HPL-MxP, their check, and their line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import in_process
import jobs
import numpy as np
import pytest
from jobs import pdgemm
from many_commands import one_line, several

from pdgemm.tools.verification import hpl

pytestmark = jobs.needs_mpiexec
LINE = re.compile(r"^WR[A-Z0-9]+ +(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+ +\d\.\d+e[+-]\d\d$", re.MULTILINE)
CHECK = re.compile(r"^\|\|Ax-b\|\|_oo/\(eps.*\*N\)= +(\d\.\d{8}e[+-]\d\d) \.{6} (PASSED|FAILED)$", re.MULTILINE)


@pytest.mark.parametrize(("n", "seed"), [(1, 3), (7, 100), (33, 2**64 - 1)])
def test_numbers_of_the_generator(n: int, seed: int) -> None:
    """Any elements at any place are those of the recurrence, one after another down the columns."""
    x, sequence = seed, list[float]()
    for _ in range(n * (n + 1)):
        x = (6364136223846793005 * x + 1) % 2**64
        sequence.append(x / 2**64 - 0.5)
    whole = np.array(sequence).reshape(n + 1, n).T
    i, j = np.arange(n)[::-3, None], np.arange(n + 1)[None, ::2]
    assert np.array_equal(hpl.generator(n, seed)(i, j), whole[i, j])


def test_systems() -> None:
    """HPL's n x (n + 1) matrix; HPL-MxP's matrix, whose diagonal is the sum of the other elements of its row."""
    A, B = (x.allgather() for x in hpl.system("HPL", 50, block=8))
    first = (6364136223846793005 * 100 + 1) % 2**64
    assert A[0, 0] == 0.5 - first / 2**64 and np.array_equal(np.c_[A, B], -_numbers(50, 51, 100))
    A, B = (x.allgather() for x in hpl.system("HPL-MxP", 50, block=8))
    numbers, apart = _numbers(50, 50, 1), ~np.eye(50, dtype=bool)
    assert np.array_equal(A[apart], numbers[apart]) and np.array_equal(B, _numbers(50, 1, 2))
    assert np.allclose(A.diagonal(), np.where(apart, abs(numbers), 0).sum(axis=1), rtol=1e-14)


def _numbers(rows: int, cols: int, seed: int) -> np.ndarray:
    numbers: np.ndarray = hpl.generator(rows, seed)(np.arange(rows)[:, None], np.arange(cols)[None, :])
    return numbers


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_residuals_and_lines(tmp_path: Path, ranks: int) -> None:
    """The same system on any grid; the JSON object has the numbers of the line."""
    shape = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[ranks]
    grid = ["--nb", "16", "--grid", "x".join(map(str, shape))]
    commands = [["hpl", "150", *grid], ["hpl", "150", "--mxp", *grid], ["hpl", "150", "--mxp", "--json"]]
    runs = several(ranks, commands, tmp_path) if ranks > 1 else [pdgemm(1, *x, cwd=tmp_path) for x in commands]
    assert [run.returncode for run in runs] == [0, 0, 0], [run.stderr for run in runs]
    for run in runs[:2]:
        (line,), ((residual, verdict),) = LINE.findall(run.stdout), CHECK.findall(run.stdout)
        assert line == ("150", "16", *map(str, shape)) and verdict == "PASSED" and 0 < float(residual) < 1
    assert "WRFP64" in runs[0].stdout and "float32" not in runs[0].stdout
    assert "WRFP32" in runs[1].stdout and "by factors in float32, refined" in runs[1].stdout
    facts = json.loads(runs[2].stdout)
    assert facts["hpl"].keys() >= {"n", "nb", "seconds", "gflops"} and facts["ranks"] == ranks
    assert facts["hpl"]["passed"] and facts["hpl"]["residual"] < 1 and facts["hpl"]["benchmark"] == "HPL-MxP"
    operations = 2 / 3 * 150**3 + 3 / 2 * 150**2
    assert np.isclose(facts["hpl"]["gflops"] * facts["hpl"]["seconds"] * 1e9, operations)


def test_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "need" in one_line(pdgemm(1, "hpl", "2000000", cwd=tmp_path))  # more memory than there is
    monkeypatch.setattr(hpl, "LIMIT", 0)
    failed = in_process.run(["hpl", "20"], tmp_path)
    assert failed.returncode == 1 and CHECK.findall(failed.stdout)[0][1] == "FAILED"
