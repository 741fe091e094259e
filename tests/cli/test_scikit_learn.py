"""scikit-learn, SciPy and array-api-extra on distributed arrays, as a program that starts on new ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import needs_mpiexec, python, run

JOB = Path(__file__).parents[1] / "helpers" / "scikit_learn_job.py"


@needs_mpiexec
@pytest.mark.timeout(400)  # 4 ranks take long beside another test on two cores
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_estimators_and_metrics_have_the_results_of_numpy(ranks: int) -> None:
    done = run(python(ranks, "-m", "mpi4py", JOB), timeout=360, SCIPY_ARRAY_API="1", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-2000:]
