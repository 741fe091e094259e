"""The other benchmarks, small: they run, and report each of the things that they compare."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
from tiers import thorough

pytestmark = thorough

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
SAID = {
    "bench_layouts.py 24 30x5x7 --repeats 2": ["24 x 24 x 24", "blocks of 64", "1D columns", "groups of"],
    "bench_overhead.py --repeats 1": [
        "a plan of new extents",
        "pdgemm(1, A, B, 0, C)",
        "shared",
        "ring",
        "a persistent request",
    ],
    "bench_overlap.py -n 64 --panel-width 16 --repeats 1": ["ibcast lookahead 0", "ring   lookahead 2"],
    "bench_emulated.py --sizes 48 --names ozaki-4,bf16x9 --repeats 1": ["ozaki-4", "bf16x9", "|A||B|"],
    "bench_qr.py 300x8": ["300x8 auto", "300x8 tsqr", "300x8 scipy", "300x8 numpy"],
    "bench_tracing.py --sizes 48 --width 8 --repeats 2 --nvtx": ["summa, ring", "stationary_a, ring", "ns with one"],
    "bench_states.py --cases 5x3,1x40 --repeats 1": ["save 5 of 3 x 3", "load 1 of 40 x 40", "alone", "times as fast"],
    "bench_redistribute.py --size 64 --repeats 1": ["columns to rows", "blocks of 64 to 96"],
}


@jobs.needs_mpiexec
@pytest.mark.parametrize("options", SAID)
def test_it_reports_all_that_it_compares(options: str) -> None:
    script, *rest = options.split()
    done = jobs.run(jobs.python(2, "-m", "mpi4py", SCRIPTS / script, *rest))
    assert done.returncode == 0, done.stderr
    assert [x for x in SAID[options] if x not in done.stdout] == [], done.stdout


@jobs.needs_mpiexec
def test_linear_algebra_beside_lapack(tmp_path: Path) -> None:
    """ScaLAPACK takes part where scripts/benchmarks/setup_peers.sh has compiled its driver."""
    files = tmp_path / "linalg.json", tmp_path / "linalg.md"
    options = ["--quick", "--functions", "cholesky,trmm", "--json", files[0], "--markdown", files[1]]
    done = jobs.run(jobs.python(0, SCRIPTS / "bench_linalg.py", *options))
    assert done.returncode == 0, done.stderr
    found, text = json.loads(files[0].read_text())["results"], files[1].read_text()
    assert [(x["function"], x["contender"]) for x in found] == [
        (function, name) for function in ("cholesky", "trmm") for name in ("product", "pdgemm", "scalapack", "scipy")
    ]
    for x in found:
        assert x["gigaflops"] or (x["contender"] == "scalapack" and x["trouble"].startswith("not installed")), x
        assert len(x["product_seconds"]) == len(x["rate_over_product"]) or x["unlike"], x
        assert f" | {x['contender']} | " in text
    done = jobs.run(jobs.python(0, SCRIPTS / "bench_linalg.py", "--functions", "sort"))
    assert done.returncode == 2 and "is none of" in done.stderr


@jobs.needs_mpiexec
def test_jobs_beside_numpy(tmp_path: Path) -> None:
    words = ["--sizes", "40", "--repeats", "1", "--different", "--sync", "--folder", tmp_path, "--json", tmp_path / "j"]
    words += ["--with", "--memory 3MiB --checkpoint 0s"]
    done = jobs.run(jobs.python(0, SCRIPTS / "bench_job.py", *words))
    assert done.returncode == 0, done.stderr
    parts = "pdgemm --memory 3MiB --checkpoint 0s"
    assert [line.split(" | ")[:2] for line in done.stdout.splitlines()[2:]] == [
        ["| 40", name + more] for more in ("", " / numpy") for name in ("numpy", "pdgemm", parts)[bool(more) :]
    ]
    for x in json.loads((tmp_path / "j").read_text()):
        assert sum(x[y] for y in ("start", "read", "product", "write", "save")) == pytest.approx(x["all"])
        assert x["start"] > 0 and (x["save"] > 0) == (x["who"] == parts)


@jobs.needs_mpiexec
@thorough  # its ranks are run by test_cuda_layer.py
def test_what_runs_on_gpus_runs_on_the_host(tmp_path: Path) -> None:
    options = ["--device", "host", "--sizes", "40", "--ranks", "1,2", "--repeats", "1", "--transfers", "2"]
    done = jobs.run(jobs.python(0, SCRIPTS.parent / "gpu" / "bench_gpu.py", *options, "--out", tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [run["ranks"] for run in found["runs"]] == [1, 2]
    for run in found["runs"]:
        assert all(x["right"] and x["as_predicted"] for x in run["correct"])
        assert all(x["ratio"] > 0 for x in run["products"])
    assert {x["moved_by"] for x in found["runs"][1]["correct"]} == {
        "shared",
        "ring",
        "ibcast",
        "shift",
        "reduce_scatter",
    }
