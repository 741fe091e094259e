"""Benchmarks of pdgemm alone, and beside other libraries, with small sizes: they report all comparisons."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jobs
import pytest
from tiers import thorough

pytestmark = thorough

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
SAID = {
    "bench_products.py product --shapes 48 --repeats 1": ["48 x 48 x 48 float64", "BLAS", "pdgemm"],
    "bench_products.py layouts --shapes 24,30x5x7 --repeats 2": [
        "30 x 5 x 7",
        "blocks of 64",
        "1D columns",
        "groups of",
    ],
    "bench_products.py overhead --repeats 1": ["pdgemm(1, A, B, 0, C)", "shared", "ring", "a persistent request"],
    "bench_products.py overlap --size 64 --panel-width 16 --repeats 1": ["ibcast lookahead 0", "ring lookahead 2"],
    "bench_products.py emulated --sizes 48 --names ozaki-4,bf16x9 --repeats 1": ["ozaki-4", "bf16x9", "|A||B|"],
    "bench_products.py epilogue --sizes 24 --repeats 1": ["gelu_tanh, 24 x 24 float32", "passes", "of NumPy's time"],
    "bench_products.py protect --sizes 24 --repeats 1": ["24 x 24 float32", "protected", "checksums on rank 0"],
    "bench_products.py tracing --sizes 48 --width 8 --repeats 2 --nvtx": ["summa, ring", "spans on rank", "with one"],
    "bench_matrices.py elements --sizes 8 --repeats 1": ["var, axis 0", "A - A.mean(0)", "NumPy"],
    "bench_matrices.py redistribute --size 64 --repeats 1": ["columns to rows", "blocks of 64 to 96"],
    "bench_matrices.py qr --shapes 300x8 --repeats 1": ["300x8", "auto", "tsqr", "scipy", "numpy", "GFLOP/s"],
    "bench_matrices.py states --cases 5x3,1x40 --repeats 1": ["save 5 of 3 x 3", "load 1 of 40 x 40", "in a loop"],
    "bench_tensors.py contractions --occupied 3 --virtual 5 --calls 1 --repeats 1": [
        "mnef,efin->mi",
        "all 12",
        "words",
    ],
    "bench_tensors.py products --size 32 --repeats 1": ["ijk,kl->ijl", "pdgemm", "einsum"],
    "bench_tensors.py moves --extent 4 --repeats 1": ["all axes reversed", "numpy", "in_layout", "50%"],
    "bench_tensors.py between-hosts --extents 3x4 --repeats 1": ["free layouts", "default layouts", "transfer"],
    "bench_planning.py steps --repeats 1": ["a plan of new extents", "the first plan of a script"],
    "bench_torch.py modules --hidden 16 --length 8 --repeats 1": ["DistributedDataParallel", "dp", "tp", "one process"],
}


@jobs.needs_mpiexec
@pytest.mark.parametrize("options", SAID)
def test_benchmarks_report_all_comparisons(options: str) -> None:
    script, *rest = options.split()
    done = jobs.run(jobs.python(2, "-m", "mpi4py", SCRIPTS / script, *rest))
    assert done.returncode == 0, done.stderr
    assert [x for x in SAID[options] if x not in done.stdout] == [], done.stdout


@jobs.needs_mpiexec
def test_linear_algebra_beside_lapack(tmp_path: Path) -> None:
    """All contenders are reported; ScaLAPACK only if scripts/benchmarks/setup_peers.sh has compiled its driver."""
    options = ["--quick", "--functions", "cholesky,trmm", "--json", tmp_path / "linalg.json"]
    done = jobs.run(jobs.python(0, SCRIPTS / "bench_linalg.py", *options))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "linalg.json").read_text())["results"]
    assert [(x["layout"].split(":")[0], x["contender"]) for x in found] == [
        (function, name) for function in ("cholesky", "trmm") for name in ("product", "pdgemm", "scalapack", "scipy")
    ]
    for x in found:
        assert x["seconds"] or (x["contender"] == "scalapack" and x["trouble"].startswith("not installed")), x
        assert len(x["yardstick"]) == len(x["ratio"]) or x["unlike"], x
        assert f"\n  {x['contender']} " in done.stdout
    done = jobs.run(jobs.python(0, SCRIPTS / "bench_linalg.py", "--functions", "sort"))
    assert done.returncode == 2 and "is not one of" in done.stderr


@jobs.needs_mpiexec
def test_jobs_beside_numpy(tmp_path: Path) -> None:
    words = ["--sizes", "40", "--repeats", "1", "--different", "--sync", "--folder", tmp_path, "--json", tmp_path / "j"]
    words += ["--with", "--memory 3MiB --checkpoint 0s"]
    done = jobs.run(jobs.python(0, SCRIPTS / "bench_jobs.py", "files", *words))
    assert done.returncode == 0, done.stderr
    names = ["numpy", "pdgemm", "pdgemm --memory 3MiB --checkpoint 0s"]
    seconds = {x["contender"]: x["seconds_median"] for x in json.loads((tmp_path / "j").read_text())["results"]}
    assert [*seconds] == names
    for name in names:
        (line,) = (x for x in done.stdout.splitlines() if x.startswith(f"    {name}: "))
        parts = {x.split()[0]: float(x.split()[1]) for x in line.rpartition(": ")[2].split(", ")}
        assert [*parts] == ["start", "read", "product", "write", "save"] and parts["start"] > 0
        assert sum(parts.values()) == pytest.approx(seconds[name], abs=0.03)  # each number is rounded


@jobs.needs_mpiexec
def test_steps_of_jobs() -> None:
    """A contender of `gpt` takes a step for each line of its input, and prints seconds."""
    pytest.importorskip("torch")
    sizes = "--layers 2 --hidden 8 --heads 2 --sequence 8 --batch 4 --pp 2 --microbatches 2"
    words = jobs.python(2, SCRIPTS / "bench_jobs.py", "serve-gpt", f"--words={sizes}")
    done = jobs.run(["sh", "-c", f"echo step | {shlex.join(words)}"])
    assert done.returncode == 0 and float(done.stdout) > 0, done.stderr
