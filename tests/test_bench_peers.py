"""scripts/bench_peers.py, small: the protocol of contenders, what is reported of each, and that wrong results show."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from problems import outside_a_launcher

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PLUG_IN = """
import sys, time
assert sys.argv[1:] in (["64", "3"], ["500", "3"], ["8", "3"]), sys.argv
for lines, line in enumerate(sys.stdin, 1):
    if not line.strip():
        break
    m, n, k = map(int, line.split())
    assert m == int(sys.argv[1]) and lines <= 3
    print("it may talk")
    print("- not this one" if k == 500 else f"0.25 as {m} x {n}", flush=True)
"""


def bench(*options: str) -> SimpleNamespace:
    command = [sys.executable, SCRIPTS / "bench_peers.py", *options]
    return subprocess.run(command, env=outside_a_launcher(), capture_output=True, text=True, timeout=100)


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="no mpiexec on PATH")
def test_all_kinds_of_contenders(tmp_path: Path) -> None:
    (tmp_path / "plug_in.py").write_text(PLUG_IN)
    files = tmp_path / "peers.json", tmp_path / "peers.md"
    done = bench(
        *("--quick", "--contenders", "numpy,pdgemm,heat"),
        *("--external", f"mine={sys.executable} {tmp_path}/plug_in.py {{m}} {{repeats}}"),
        *("--external", f"broken={sys.executable} -c 'raise ValueError(\"out of order\")'"),
        *("--json", str(files[0]), "--markdown", str(files[1])),
    )
    assert done.returncode == 0, done.stderr
    found, text = json.loads(files[0].read_text()), files[1].read_text()
    assert found["ranks"] == 2 and found["cpu"] and "numpy" in found["versions"]
    results = {(x["layout"], x["shape"], x["contender"]): x for x in found["results"]}
    assert len(results) == 2 * 3 * 5
    for (_, shape, name), x in results.items():
        able = name in ("numpy", "pdgemm") or (name == "mine" and shape != "large-k")
        if name == "heat" and not x["trouble"].startswith("not installed"):
            continue
        assert bool(x["trouble"]) != able, x
        assert len(x["numpy"]) == (2 if able and name != "numpy" else 0), x
        assert not able or x["seconds_min"] <= x["seconds_median"] <= x["seconds_max"], x
    mine = results["columns", "tall", "mine"]
    assert mine["seconds"] == [0.25, 0.25] and mine["note"] == "as 500 x 8"
    assert mine["ratio_max"] == max(mine["numpy"]) / 0.25
    assert results["native", "large-k", "mine"]["trouble"] == "not this one"
    assert results["native", "64", "broken"]["trouble"] == "ValueError: out of order"
    assert text.startswith("# C = A B in float64 on 2 ranks x 1 thread\n")
    assert text.count("| m, n, k | 64 | tall: 500, 8, 8 | large-k: 8, 8, 500 |") == 4
    assert text.count("| mine | 250 (250 to 250) | 250 (250 to 250) | – |") == 2
    assert text.count("| broken | – | – | – |") == 4
    assert "- mine: 64: as 64 x 64; tall: as 500 x 8; large-k: not this one\n" in text
    assert "- broken: ValueError: out of order\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shapes", "1024,huge"), "'huge' is none of 512,"),
        (("--shapes", "10x20"), "'10x20' is none of"),
        (("--contenders", "pdgemm,nobody"), "'nobody' is none of numpy, pdgemm,"),
        (("--external", "nameless"), "'nameless' is not NAME=COMMAND"),
        (("--external", "x=run {size}"), "'x=run {size}' is not NAME=COMMAND: KeyError: 'size'"),
    ],
)
def test_bad_options(options: tuple[str, ...], said: str) -> None:
    done = bench(*options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_what_is_not_installed_is_named() -> None:
    """In an environment without any of the peers."""
    done = bench("--quick", "--contenders", "pylops*,heat", "--layout", "native")
    if "not installed" not in done.stdout:
        pytest.skip("they are installed")
    assert "| heat | – | – | – |" in done.stdout
    assert "- pylops-mpi:summa: not installed (scripts/setup_peers.sh)\n" in done.stdout


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
