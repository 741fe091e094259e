"""bench_peers.py with small products: the protocol of contenders, their reports, and errors for wrong results."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jobs
import numpy as np
import pytest
from tiers import thorough

pytestmark = thorough

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
PLUG_IN = """
import os, sys, time
assert sys.argv[1:] in (["64", "3"], ["500", "3"], ["8", "3"]), sys.argv
for lines, line in enumerate(sys.stdin, 1):
    if not line.strip():
        break
    m, n, k = map(int, line.split())
    assert m == int(sys.argv[1]) and lines <= 3
    print("it may talk\\nkernel " + os.environ["OPENBLAS_CORETYPE"])
    print("- not this one" if k == 500 else f"0.25 as {m} x {n}", flush=True)
"""


OTHER = """
print("kernel Elbrus")  # no other is of its generation
while input():
    print(0.25, flush=True)
"""
FAKE = """
import os, sys
told, known = os.environ["OPENBLAS_CORETYPE"], {known!r}.split()
kernel = told if told in known else "Prescott"
print({said!r}.format(kernel=kernel), file={stream}, flush=True)
for line in sys.stdin:
    if line.strip():
        print("1.5", *(os.environ[x + "_NUM_THREADS"] for x in ("OMP", "OPENBLAS", "MKL")), flush=True)
"""
MKL = "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture {}, Lnx 2.60GHz lp64"
WIDE = "Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with support for INT8 enabled processors"
ANY = "Intel(R) Architecture processors"


def bench(*options: str) -> jobs.Finished:
    return jobs.run(jobs.python(0, SCRIPTS / "bench_peers.py", *options))


@jobs.needs_mpiexec
def test_all_kinds_of_contenders(tmp_path: Path) -> None:
    (tmp_path / "plug_in.py").write_text(PLUG_IN)
    (tmp_path / "other.py").write_text(OTHER)
    done = bench(
        *("--quick", "--contenders", "numpy,pdgemm,heat"),
        *("--external", f"mine={sys.executable} {tmp_path}/plug_in.py {{m}} {{repeats}}"),
        *("--external", f"other={sys.executable} {tmp_path}/other.py"),
        *("--external", f"broken={sys.executable} -c 'raise ValueError(\"out of order\")'"),
        *("--json", str(tmp_path / "peers.json")),
    )
    assert done.returncode == 0, done.stderr
    found, lines = json.loads((tmp_path / "peers.json").read_text()), done.stdout.splitlines()
    assert found["ranks"] == 2 and found["cpu"] and "numpy" in found["versions"]
    results = {(x["layout"], x["shape"], x["contender"]): x for x in found["results"]}
    assert len(results) == 2 * 3 * 6
    for (_, shape, name), x in results.items():
        able = name in ("numpy", "pdgemm", "other") or (name == "mine" and shape != "large-k")
        if name == "heat" and not x["trouble"].startswith("not installed"):
            continue
        assert bool(x["trouble"]) != able, x
        assert len(x["yardstick"]) == (2 if able and name != "numpy" else 0), x
        assert not able or x["seconds_min"] <= x["seconds_median"] <= x["seconds_max"], x
    mine = results["columns", "tall", "mine"]
    assert mine["seconds"] == [0.25, 0.25] and mine["note"] == "as 500 x 8"
    assert mine["ratio_max"] == max(mine["yardstick"]) / 0.25
    assert mine["kernel"] == results["columns", "tall", "numpy"]["kernel"] and not mine["unlike"]
    other = results["native", "64", "other"]
    assert other["kernel"] == "Elbrus" and other["ratio_median"] is None and other["seconds_median"] == 0.25
    assert results["native", "large-k", "mine"]["trouble"] == "not this one"
    assert results["native", "64", "broken"]["trouble"] == "ValueError: out of order"
    assert lines[0] == "C = A B in float64 on 2 ranks x 1 thread"
    said: dict[str, list[str]] = {}
    for name, _, rest in (line.strip().partition(" ") for line in lines if line.startswith("  ")):
        said.setdefault(name, []).append(" ".join(rest.split()))
    assert [len(x) for x in said.values()] == 6 * [6]
    for number in (0, 3):  # the first case of each layout
        for at, text in enumerate(("as 64 x 64", "as 500 x 8")):
            assert re.fullmatch(rf"250 ms \S+ \(\S+ to \S+\) {mine['kernel']}; {text}", said["mine"][number + at])
        assert said["mine"][number + 2] == "not this one"
    assert all(x.startswith("250 ms Elbrus; no ratio: Elbrus, NumPy ") for x in said["other"])
    assert said["broken"] == 6 * ["ValueError: out of order"]


def test_bad_options() -> None:
    for options, said in (
        ("--shapes 1024,huge", "'huge' is not one of 512,"),
        ("--shapes 10x20", "'10x20' is not one of"),
        ("--contenders pdgemm,nobody", "'nobody' is not one of numpy, pdgemm,"),
        ("--threads 4096", "NumPy's BLAS takes "),
        ("--external nameless", "'nameless' is not NAME=COMMAND"),
        ("--external x={size}", "'x={size}' is not NAME=COMMAND: KeyError: 'size'"),
    ):
        done = bench(*options.split())
        assert done.returncode == 2
        assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.fixture
def peers_job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("peers.job")


@pytest.mark.parametrize(
    ("known", "said", "stream", "kernel", "unlike", "nearest"),
    [
        ("Haswell Cooperlake", "kernel {kernel}", "sys.stdout", "Cooperlake", "", ""),
        ("Haswell SkylakeX", "Core: {kernel}", "sys.stderr", "SkylakeX", "", "SkylakeX for Cooperlake"),
        ("Haswell", "kernel {kernel}", "sys.stdout", "Prescott", "SSE, NumPy AVX-512", "SkylakeX"),
        ("", "Core not found: {kernel}\nCore: Haswell", "sys.stderr", "Haswell", "AVX2, NumPy AVX-512", "SkylakeX"),
        ("", "Core: SkylakeX\nCore: Zen", "sys.stderr", "SkylakeX, Zen", "SkylakeX, Zen, NumPy AVX-512", "SkylakeX"),
        ("", MKL.format(WIDE), "sys.stdout", "AVX-512", "", ""),
        ("", f"Core: SkylakeX\nkernel {ANY}", "sys.stdout", "", "not known, NumPy AVX-512", ""),
        ("", "kernel /usr/lib/blas/libblas.so.3", "sys.stdout", *["/usr/lib/blas/libblas.so.3"] * 2, "SkylakeX"),
        ("", "nothing", "sys.stdout", "", "not known, NumPy AVX-512", ""),
    ],
)
def test_a_contender_uses_the_kernel_of_numpy(
    known: str, said: str, stream: str, kernel: str, unlike: str, nearest: str, monkeypatch: Any, peers_job: Any
) -> None:
    """A contender uses NumPy's kernel, or the nearest that it supports, and one thread, whatever the user has set."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    monkeypatch.setenv("MKL_NUM_THREADS", "4")
    program = FAKE.format(known=known, said=said, stream=stream).replace("{", "{{").replace("}", "}}")
    with peers_job.Job(shlex.join([sys.executable, "-c", program]), "Cooperlake") as job:
        assert job.multiply(1, 2, 3) == (1.5, "1 1 1")
        assert job.kernel == kernel
        assert job.unlike.startswith(unlike) if unlike else not job.unlike
        assert nearest in job.nearest and bool(nearest) == bool(job.nearest)
        assert job.multiply(1, 2, 3) == (1.5, "1 1 1")


def test_kernels_reported_by_contenders(peers_job: Any) -> None:
    """If NumPy's kernel is unknown, kernels are not compared; messages of OpenBLAS are not the reason of a failure."""
    with peers_job.Job(f"{sys.executable} -c \"input(); print('kernel Haswell'); print(1)\"", "") as job:
        job.multiply(1, 2, 3)
        assert job.unlike == "AVX2, NumPy not known"
    failing = f"{sys.executable} -c \"import sys; sys.exit('no room' + chr(10) + 'Core: Haswell')\""
    with peers_job.Job(failing, "Haswell") as job, pytest.raises(peers_job.Unable, match=r"^no room$"):
        job.multiply(1, 2, 3)


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from peers.worker import Block, error, filled, nothing

    alone = SimpleNamespace(allreduce=lambda y: y)
    m, n, k = 30, 20, 2000
    A, B = (filled(shape, slice(None), slice(None), 1, "float64") for shape in ((m, k), (k, n)))
    C = A.values @ B.values
    assert error(alone, (m, n, k), (A, B, Block(A.rows, B.cols, C))) < 1e-14  # type: ignore[arg-type]
    for wrong in (C + 1, C[:, ::-1], np.roll(C, 1), np.float16(C), np.nan * C):
        assert not error(alone, (m, n, k), (A, B, Block(A.rows, B.cols, wrong))) < 1e-5  # type: ignore[arg-type]
    assert not error(alone, (m, n, k), (A, B, nothing())) < 0.9  # type: ignore[arg-type]
