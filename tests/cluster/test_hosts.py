"""scripts/hosts.sh: hosts with separate networks, names and memory, which are removed when the command ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
from tiers import thorough

from pdgemm.support.launcher import outside_job

pytestmark = thorough

SCRIPT = Path(__file__).parents[2] / "scripts" / "hosts.sh"


def hosts(*arguments: str, **environment: str) -> Any:
    """Run `scripts/hosts.sh ARGUMENTS`; return the finished process."""
    return jobs.run([SCRIPT, *arguments], timeout=60, **environment)


@pytest.fixture(scope="module", autouse=True)
def can_be_had() -> None:
    run = hosts("1", "true")
    if run.returncode == 3:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def open_mpi() -> None:
    mpirun = shutil.which("mpirun")
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout if mpirun else ""
    if "Open MPI" not in said:
        pytest.skip("mpirun is not Open MPI's")


def interfaces() -> set[str]:
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def running(word: str) -> list[int]:
    """Return the ids of processes that have this word among their arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:  # the process has ended
            continue
        found += [int(place.parent.name)] * (word.encode() in words)
    return found


def until(condition: Any) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


LOOK = """
import json, os, socket
space = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "ipc", "uts")]
name = socket.gethostname()
print(json.dumps({"name": name, "address": socket.gethostbyname(name), "shm": os.listdir("/dev/shm"), "space": space}))
open(f"/dev/shm/left by {name}", "w").close()
"""


def test_each_has_a_name_an_address_and_memory_of_its_own(tmp_path: Path) -> None:
    look = tmp_path / "look.py"
    look.write_text(LOOK)
    python = shlex.join([sys.executable, str(look)])
    run = hosts("3", "sh", "-c", f"{python} && for h in h1 h2 h3; do /dev/shm/on $h {python} || exit 1; done")
    assert run.returncode == 0, run.stderr
    first, *each = map(json.loads, run.stdout.splitlines())
    assert [(x["name"], x["address"]) for x in each] == [(f"h{n}", f"10.0.0.{n}") for n in (1, 2, 3)]
    assert first["name"] == "h1" and first["space"] == each[0]["space"]
    assert [any(name.startswith("left by") for name in x["shm"]) for x in each] == [True, False, False]
    machine = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "ipc", "uts")]
    assert all(len(set(spaces)) == 4 for spaces in zip(machine, *(x["space"] for x in each)))


def test_pdgemm_sees_a_node_for_each(open_mpi: None) -> None:
    ranks = ["mpirun", "-n", "6", "--map-by", "ppr:2:node", sys.executable, "-m", "pdgemm"]
    run = hosts("3", *ranks, "info", "--json")
    assert run.returncode == 0, run.stderr
    assert [(x["host"], x["ranks"]) for x in json.loads(run.stdout)["nodes"]] == [("h1", 2), ("h2", 2), ("h3", 2)]


SEND = """
from time import perf_counter
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
x = np.zeros(1 << 21, np.uint8)
for source in (0, 1, 0, 1):
    comm.Barrier()
    start = perf_counter()  # of one clock: the hosts are one machine
    comm.Bcast(x, root=source)
    comm.Barrier()
    print(perf_counter() - start, flush=True)
"""


def test_nothing_is_faster_than_the_rate(open_mpi: None) -> None:
    """Each message takes at least (bits - burst) / rate seconds, however slow the machine is."""
    rate, burst = 50_000_000, 8 * 128 * 1024 * 2  # bits/s, bits: bursts of the sender's card and of the switch's port
    run = hosts("--rate", "50mbit", "2", "mpirun", "-n", "2", "--map-by", "ppr:1:node", sys.executable, "-c", SEND)
    assert run.returncode == 0, run.stderr
    seconds = [float(line) for line in run.stdout.split()]
    assert len(seconds) == 8
    assert min(seconds) >= (8 * (1 << 21) - burst) / rate


def test_exit_codes_and_bad_arguments() -> None:
    assert hosts("1", "sh", "-c", "exit 7").returncode == 7
    for arguments in ((), ("2",), ("0", "true"), ("x", "true"), ("--rate", "fast", "2", "true"), ("--rate",)):
        run = hosts(*arguments)
        assert run.returncode == 2
        assert run.stderr.startswith("hosts.sh: ") and run.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["unshare", "tc"])
def test_hosts_that_cannot_be_made_are_a_one_line_error(tmp_path: Path, missing: str) -> None:
    """Namespaces are forbidden, or the kernel cannot limit a rate, which fails after some hosts were made."""
    (tmp_path / missing).write_text(f"#!/bin/sh\necho '{missing}: not on this machine' >&2\nexit 1\n")
    (tmp_path / missing).chmod(0o755)
    run = hosts("2", "true", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.returncode == 3
    assert run.stderr.startswith("hosts.sh: ") and run.stderr.count("\n") == 1
    assert run.stderr.endswith(f"{missing}: not on this machine\n")


def test_several_at_a_time_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    """Two calls at a time; a killed call leaves no process, interface or mount on the machine."""
    before, mounts = interfaces(), Path("/proc/mounts").read_text()
    ready = tmp_path / "ready"
    program = ["sh", "-c", f"touch {shlex.quote(str(ready))}; sleep 1000 & wait", str(ready)]
    first = subprocess.Popen([SCRIPT, "2", *program], env=outside_job())
    try:
        assert until(ready.exists)
        assert running(str(ready))
        assert hosts("2", "/dev/shm/on", "h2", "uname -n").stdout == "h2\n"
        assert interfaces() == before and Path("/proc/mounts").read_text() == mounts
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert until(lambda: not running(str(ready)))
    assert interfaces() == before


def benchmark(script: str, *options: str, folder: Path) -> Any:
    """Run a benchmark on two hosts; return the JSON that it writes, and its output."""
    words = [*options, "--hosts", "2x1", "--json", str(folder / "measured.json")]
    done = jobs.run(jobs.python(0, SCRIPT.parent / "benchmarks" / script, *words))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "measured.json").read_text()), done.stdout


def test_linear_algebra_over_its_limit(open_mpi: None, tmp_path: Path) -> None:
    """The report has ratios of times over the limit of the cables, for pdgemm and, if installed, ScaLAPACK."""
    measured, text = benchmark("bench_linalg.py", "--quick", "--functions", "lu", folder=tmp_path)
    assert measured["hosts"] == "2x1" and measured["ranks"] == 2 and "--inside" not in measured["command"]
    limit, pdgemm, scalapack = measured["results"]
    assert [x["contender"] for x in measured["results"]] == ["limit", "pdgemm", "scalapack"]
    assert min(limit["seconds"]) > 0 and " MB at " in limit["note"] and " cables of " in limit["note"]
    for x in (pdgemm, scalapack):
        if x["contender"] == "scalapack" and x["trouble"].startswith("not installed"):
            continue
        (limit_seconds,), (seconds,) = x["yardstick"], x["seconds"]
        assert x["unlike"] or x["ratio"] == pytest.approx([seconds / limit_seconds]), x
        assert f"\n  {x['contender']} " in text


def test_products_over_their_limit(open_mpi: None, tmp_path: Path) -> None:
    options = ["--ratios", "1", "--shapes", "300", "--layouts", "own", "--algorithms", "both,auto", "--repeats", "1"]
    measured, text = benchmark("bench_hosts.py", *options, "--no-scalapack", folder=tmp_path)
    limit, *others = measured["results"]
    assert [x["contender"] for x in measured["results"]] == ["limit", "both", "auto"]
    assert min(limit["seconds"]) > 0 and " MB at " in limit["note"], limit
    for x in others:
        assert x["seconds"] and float(x["note"].partition(" MB")[0]) > 0, x
        assert x["unlike"] or x["ratio"] == pytest.approx([x["seconds"][0] / x["yardstick"][0]]), x
        assert f"\n  {x['contender']} " in text


@pytest.mark.parametrize("hosts", ["2", "x1", "2x0", "2x1x1"])
def test_hosts_that_are_not_numbers(hosts: str) -> None:
    done = jobs.run(jobs.python(0, SCRIPT.parent / "benchmarks" / "bench_linalg.py", "--hosts", hosts))
    assert done.returncode == 2 and "is not HOSTSxRANKS" in done.stderr, done.stderr


MULTIPLY = """
import json, os, subprocess, sys
from mpi4py import MPI
import pdgemm as pg
comm, n, algorithm, cut, trace = MPI.COMM_WORLD, int(sys.argv[1]), *sys.argv[2:]
with pg.ProcessGrid(comm) as grid:
    A, B = (pg.DistMatrix.random((n, n), grid=grid, seed=seed) for seed in (1, 2))
    expected = A.allgather() @ B.allgather()
    comm.Barrier()
    if comm.rank == 0 and cut:
        subprocess.run(["/dev/shm/cable", "h2", "down"], check=True)
        mending = subprocess.Popen(["sh", "-c", "sleep 1; /dev/shm/cable h2 up; touch /dev/shm/mended"])
    with pg.trace(trace or None, grid):
        C = pg.pdgemm(1, A, B, algorithm=algorithm)
    mended = os.path.exists("/dev/shm/mended")
    wrong = abs(C.allgather() - expected).max()
    if comm.rank == 0:
        again = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
        sent_again = int(again[1][again[0].index("RetransSegs")])
        counts = C.report.counted == C.report.predicted
        print(json.dumps({"wrong": wrong, "counts": counts, "mended": mended, "sent_again": sent_again}))
"""


def multiplied(
    number: int, algorithm: str, *, before: str = "true", cut: bool = False, trace: str = "", n: int = 800
) -> Any:
    """Run a product on hosts of one rank each after the command `before`; return its JSON.

    cut : a cable is cut when the product begins, and mended later.
    """
    ranks = ["mpirun", "-n", str(number), "--map-by", "ppr:1:node", sys.executable, "-c", MULTIPLY]
    command = f"{before} && exec {shlex.join([*ranks, str(n), algorithm, 'cut' if cut else '', trace])}"
    run = hosts("--rate", "100mbit", str(number), "sh", "-c", command)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["wrong"] < 1e-11 and found["counts"]
    return found


@pytest.mark.parametrize("algorithm", ["summa", "cannon", "inner"])
def test_a_cable_that_is_cut_and_mended_delays_a_product(open_mpi: None, algorithm: str) -> None:
    """The product ends only after the cable is mended."""
    assert multiplied(2, algorithm, cut=True)["mended"]


@pytest.mark.parametrize("algorithm", ["summa", "cannon"])
def test_lost_packets_are_sent_again(open_mpi: None, algorithm: str) -> None:
    if not shutil.which("nft"):
        pytest.skip("no nft, which is in nftables")
    assert multiplied(2, algorithm, before="/dev/shm/cable h2 loss 2")["sent_again"] > 0


def test_a_profile_names_the_host_whose_cable_is_slow(open_mpi: None, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.json")
    multiplied(3, "summa", before="/dev/shm/cable h2 rate 10mbit", trace=trace, n=300)
    run = jobs.run([sys.executable, "-m", "pdgemm", "profile", trace])
    assert run.returncode == 0, run.stderr
    assert "network: h2 is the slowest node" in run.stdout


OF_ONE_HOST = """
from pathlib import Path
from mpi4py import MPI
import pdgemm as pg
from pdgemm.errors import FileError
from pdgemm.io.hdf5 import save
comm, folder = MPI.COMM_WORLD, Path("/dev/shm/folder")
if comm.rank == 0:
    folder.mkdir()
with pg.ProcessGrid(comm) as grid:
    A = pg.DistMatrix.random((30, 30), grid=grid, seed=1)
    with pg.trace(folder / "trace.json", grid):
        A @ A
    try:
        save(folder / "a.h5", "a", A)
    except FileError as refused:
        said = comm.gather(str(refused))
    if comm.rank == 0:
        print([path.name for path in folder.iterdir()], len(set(said)), said[0])
"""


def test_a_folder_that_other_hosts_do_not_see(open_mpi: None) -> None:
    """A file that only rank 0 writes is written; if all ranks would write it, all raise, and no file remains."""
    run = hosts("2", "mpirun", "-n", "2", "--map-by", "ppr:1:node", sys.executable, "-c", OF_ONE_HOST)
    assert run.returncode == 0, run.stderr
    refused = "/dev/shm/folder/a.h5: rank 1 on h2 cannot open it (No such file or directory)"
    assert run.stdout.startswith(f"['trace.json'] 1 {refused}")
