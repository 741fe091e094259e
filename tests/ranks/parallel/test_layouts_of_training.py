"""Layouts of training in jobs of their own: other numbers of ranks than the suite's, and files of parameters."""

from __future__ import annotations

from pathlib import Path

import jobs
import perceptron
import pytest
from tiers import thorough

pytestmark = [jobs.needs_mpiexec, thorough, pytest.mark.timeout(900)]
HELPERS, HERE = Path(perceptron.__file__).parent, Path(__file__).parent
SAME_BITS = """
import sys
from pathlib import Path
from pdgemm.parallel import Mesh
from perceptron import trained

mesh = Mesh(dp=-1)
for stage in range(4):
    how = {"batch": 64, "microbatches": 8 // mesh.shape.dp, "stage": stage, "same_bits": True}
    end = trained(mesh, 50, **how)[2]
    if mesh.rank == 0:
        Path(f"{sys.argv[1]}-{stage}").write_bytes(b"".join(x.tobytes() for x in end.values()))
"""


@pytest.mark.parametrize("ranks", [5, 7])
def test_numbers_of_ranks_beside_those_of_the_suite(ranks: int) -> None:
    """5 and 7 ranks, with every stage and number of microbatches: --all has the others up to 9."""
    tests = ["-m", "pytest", "-q", "--all", "--with-mpi", "-m", "mpi", "-p", "no:cacheprovider", "--timeout", "600"]
    tests += ["-k", "every_stage", str(HERE / "test_buckets.py")]
    done = jobs.run(jobs.python(ranks, *tests), timeout=800, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr
    assert " failed" not in done.stdout and " passed" in done.stdout


def test_files_of_parameters_are_the_same(tmp_path: Path) -> None:
    """50 steps of 8 microbatches on 1, 2, 4 and 8 ranks, with each stage: the files are equal byte for byte."""
    for ranks in (1, 2, 4, 8):
        program = tmp_path / "program.py"
        program.write_text(SAME_BITS)
        path = {"PYTHONPATH": jobs.with_plant(tmp_path, "")["PYTHONPATH"] + f":{HELPERS}"}
        done = jobs.run(jobs.python(ranks, program, tmp_path / f"{ranks}"), timeout=200, OMP_NUM_THREADS="1", **path)
        assert done.returncode == 0, done.stdout + done.stderr
    files = {x.name: x.read_bytes() for x in tmp_path.glob("[1-8]-[0-3]")}
    assert len(files) == 16 and len({*files.values()}) == 1
    assert len(files["1-0"]) == 8 * sum(x.size for x in perceptron.initial().values())
