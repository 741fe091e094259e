"""Commands that end abnormally: killed, interrupted, asked to end, with different arguments, or with a flipped bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import jobs
import numpy as np
import pytest
from jobs import pdgemm
from many_commands import one_line, read
from problems import TOLERANCE, gemm_error
from processes import TEXTS, running, started

from pdgemm.support.launcher import outside_job

pytestmark = jobs.needs_mpiexec


def test_an_unexpected_error_on_one_rank_ends_the_job(folder: Path, tmp_path: Path) -> None:
    """If only one rank fails unexpectedly, the others must not hang."""
    bug = jobs.with_plant(
        tmp_path,
        "from pdgemm.support import launcher\n"
        "if launcher.launched_rank() == 1:\n"
        "    import pdgemm.algorithms.products.accumulator\n"
        "    def broken(*args): raise RuntimeError('a bug')\n"
        "    pdgemm.algorithms.products.accumulator.prepare = broken\n",
    )
    run = pdgemm(2, "multiply", "a.h5:/x", "b.h5:/y", "-o", "c.h5:/z", cwd=folder, **bug)
    assert run.returncode not in (0, 1, 2)
    assert "RuntimeError: a bug" in run.stderr
    assert not (folder / "c.h5").exists()


def test_results_are_saved_when_the_output_is_closed(folder: Path) -> None:
    command = f"{sys.executable} -m pdgemm multiply a.h5:/x b.h5:/y -o pipe.h5:/z | true"
    subprocess.run(command, shell=True, cwd=folder, env=outside_job(), timeout=60, check=True)
    assert read(folder / "pipe.h5", "z").shape == (61, 29)


def ranks_in(folder: Path) -> list[int]:
    return running(lambda words, where: where == folder and words[1:3] == ["-m", "pdgemm"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])  # SIGKILL to a rank, SIGUSR1 to the launcher
def test_a_product_that_is_ended_harms_no_file(tmp_path: Path, number: int) -> None:
    for name, matrix in (("a.h5", np.ones((2000, 2000))), ("c.h5", np.eye(3))):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = matrix
    old = (tmp_path / "c.h5").read_bytes()
    # narrow panels make the product slow enough to end it in the middle
    words = ["multiply", "a.h5:/x", "a.h5:/x", "-o", "c.h5:/x", "--panel-width", "1", "--algorithm", "summa", "--force"]
    with started(tmp_path, jobs.python(2, "-m", "pdgemm", *words), **TEXTS) as job:
        assert job.stdout.readline().split()[0] == "read"  # the product is running
        time.sleep(0.3)
        ranks = ranks_in(tmp_path)
        assert len(ranks) == 2 and job.poll() is None
        os.kill(max(ranks) if number == signal.SIGKILL else job.pid, number)
        _, errors = job.communicate(timeout=30)
        assert ranks_in(tmp_path) == []
    if number == signal.SIGUSR1:
        assert job.returncode == 128 + signal.SIGTERM and "ended by SIGUSR1 after" in errors
        assert "s, multiply: c.h5 was not written, its contents are unchanged" in errors
        assert sorted(x.name for x in tmp_path.iterdir()) == ["a.h5", "c.h5"]
    assert job.returncode != 0
    assert (tmp_path / "c.h5").read_bytes() == old


@pytest.mark.parametrize("other", ["--help", "info --json"])  # commands that do not load MPI, and that do
def test_command_lines_that_differ_are_refused(folder: Path, other: str) -> None:
    words = ["-m", "pdgemm", *other.split()]
    run = jobs.run([*jobs.python(2, "-m", "pdgemm", "info"), ":", *jobs.python(1, *words)[1:]], cwd=folder)
    assert f"called with different arguments: ranks 0-1: pdgemm info; rank 2: pdgemm {other}" in one_line(run)
    assert run.stdout == ""


@pytest.mark.parametrize("module", ["mpi4py.MPI", "pdgemm.support.signals"])
def test_sigint_while_mpi_loads_ends_the_job(folder: Path, module: str) -> None:
    """One rank receives SIGINT just before it imports mpi4py.MPI, or a module that is imported after MPI."""
    program = folder / "interrupted.py"
    program.write_text(f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r} and interrupted:
            os.kill(os.getpid(), signal.SIGINT)

interrupted = sys.argv[-1] == "2"
sys.meta_path.insert(0, Interrupt())
from pdgemm.tools.cli.commands import main
sys.argv = ["pdgemm", "info"]
main()
""")
    run = jobs.run([*jobs.python(2, program), ":", *jobs.python(1, program, "2")[1:]], cwd=folder)
    assert run.returncode != 0
    assert "Traceback" not in run.stderr


def test_sigterm_saves_a_checkpoint_and_the_same_command_resumes(tmp_path: Path) -> None:
    """It resumes on another number of ranks and with less memory; other operands or scalars are refused."""
    for seed, name in enumerate(("a.h5", "b.h5")):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.random.default_rng(seed).standard_normal((1500, 1500))
    words = ["multiply", "a.h5:/x", "b.h5:/x", "-o", "c.h5:/group/c", "--checkpoint", "1h", "--memory", "6MB"]
    with started(tmp_path, jobs.python(2, "-m", "pdgemm", *words), **TEXTS) as job:
        assert "tiles of C" in job.stdout.readline()
        time.sleep(0.3)  # the first step has begun
        job.send_signal(signal.SIGUSR1)  # the launcher forwards it
        _, err = job.communicate(timeout=100)
    assert job.returncode == 128 + signal.SIGTERM, err
    (line,) = (x for x in err.splitlines() if x.startswith("pdgemm: ended by SIGUSR1"))
    assert re.search(r"multiply: .*c\.h5 was not written, .*; the same command goes on from \d", line)
    assert {"c.h5.group%2Fc.checkpoint", "c.h5.group%2Fc.checkpoint-tiles"} < {x.name for x in tmp_path.iterdir()}
    for more, said in (
        (["--alpha", "2"], "is of another product, whose alpha is 1.0 and not 2.0: finish that one, or delete "),
        (["--transa", "T"], "is of another product, whose op(A) is N, 1500 x 1500 float64 and not T, "),
    ):
        assert said in one_line(pdgemm(1, *words, *more, cwd=tmp_path))
    run = pdgemm(3, *words[:-2], "--memory", "5MB", "--verify", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert 0 < facts["resumed"]["share"] < 1 and facts["verify"]["passed"]
    assert facts["product"]["bytes_read"] == facts["plan"]["bytes_read"] < 8 * 1500**2 * 200
    a, b, c = (read(tmp_path / file, name) for file, name in (("a.h5", "x"), ("b.h5", "x"), ("c.h5", "group/c")))
    assert gemm_error(c[::50], 1, a[::50], b) <= TOLERANCE
    assert not [x for x in tmp_path.iterdir() if "checkpoint" in x.name]


def test_a_flipped_bit_ends_the_job_or_is_repaired(folder: Path, tmp_path: Path) -> None:
    """--protect detects a flip planted in the sums of one rank, also with --checkpoint."""
    source = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    import pdgemm.algorithms.products.accumulator as module
    ready, left = module.Accumulator.prepared, [TIMES]
    def prepared(self, A, B, *_):
        multiply = ready(self, A, B)
        def work():
            multiply()
            if left[0] and self.sums.size:
                left[0] -= 1
                self.sums[0, 0] += 1
        return work
    module.Accumulator.prepared = prepared
"""
    words = ["multiply", f"{folder}/a.h5:/x", f"{folder}/b.h5:/y", "-o", "c.h5:/c", "--protect"]
    rows = r"\d+ of \d+ rows of C differ from their checksums, row \d+ first"
    flipped = r"the repetition has other bits: a bit has flipped on rank 1 on \S+; C is the result of the repetition"
    suspected = rf"{rows}, by more than rounding errors"
    shown = rf"^pdgemm: {rows}; the product is repeated\npdgemm: {flipped}$"
    for times, options, code, said in (
        (1, ["repair"], 0, shown),
        (1, ["detect"], 1, rf"^pdgemm: error: {suspected}; protect='repair' would have repeated the product$"),
        (99, ["repair"], 1, rf"^pdgemm: error: {rows}, .* twice with the same bits: the error is reproducible$"),
        (1, ["repair", "--checkpoint", "1h", "--verify"], 0, shown),
    ):
        (tmp_path / "c.h5").unlink(missing_ok=True)
        plant = jobs.with_plant(tmp_path, source.replace("TIMES", str(times)))
        run = pdgemm(2, *words, *options, cwd=tmp_path, **plant)
        assert run.returncode == code and re.search(said, run.stderr, re.MULTILINE), run.stderr
        assert (tmp_path / "c.h5").exists() == (code == 0)
