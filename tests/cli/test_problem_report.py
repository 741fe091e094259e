"""`pdgemm info --report` has all data to reproduce a problem, and no name of a user, a host or a folder."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path

import jobs
import pytest

from pdgemm.tools.profiling.environment import without_names


@jobs.needs_mpiexec
def test_the_block(tmp_path: Path) -> None:
    told = {
        "USER": "jane",
        "PDGEMM_BLAS": "auto",
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG_FILE": "/scratch/jane/logs/nccl.log",
        "PDGEMM_TOKEN": "1234567",
        "OMPI_MCA_btl_tcp_if_include": "eth0,10.1.2.0/24",
        "UCX_TLS": "rc,self,sm",
        "HDF5_SECRET": "\x1b[2Jsecret",
    }
    done = jobs.pdgemm(2, "info", "--report", cwd=tmp_path, NCCL_COMM_ID="jane@10.1.2.3", **told)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and (lines[0], lines[-1]) == ("```", "```"), done.stderr
    rows = [(line[:13].strip(), line[14:]) for line in lines[1:-1]]
    named = dict(rows)
    assert named["pdgemm"].startswith(version("pdgemm")) and named["Python"].startswith(platform.python_version())
    assert version("mpi4py") in named["MPI"] and version("h5py") in named["HDF5"] and version("scipy") in done.stdout
    assert named["ranks"] == "2 ranks on 1 node" and named["node"].startswith("HOST: 2 ranks, threads per rank 1 (")
    assert "started 2 ranks" in named["launcher"] and "multiplies" in named["BLAS"]
    variables = [text for name, text in rows if name == "variable"]
    assert {"OMP_NUM_THREADS=1", "PDGEMM_BLAS=auto", "UCX_TLS=rc,self,sm"} <= {*variables}
    unknown = ("NCCL_COMM_ID", "NCCL_DEBUG_FILE", "PDGEMM_TOKEN", "OMPI_MCA_btl_tcp_if_include", "HDF5_SECRET")
    assert {f"{name}=(not shown)" for name in unknown} <= {*variables}
    assert not re.search(r"1234567|secret\b|\x1b", done.stdout)
    assert not re.search(rf"\bjane\b|\b{re.escape(platform.node())}\b|10\.1\.2\.3|scratch", done.stdout)


def test_one_form(tmp_path: Path) -> None:
    done = jobs.pdgemm(0, "info", "--report", "--json", cwd=tmp_path)
    assert done.returncode == 2 and "choose one" in done.stderr


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("LIB=/home/jane/lib/libmpi.so.40:/opt/x.so", "LIB=.../libmpi.so.40:.../x.so"),
        ("LIB=/opt/site/x.so", "LIB=.../x.so"),
        ("~/machines/big.json", ".../big.json"),
        ("hosts node7,node7.site.edu:4, node77", "hosts HOST,HOST:4, node77"),
        ("by jane, janet and JANE_X=jane_1", "by USER, janet and JANE_X=USER_1"),
        ("10.0.0.12:80 and openblas 0.3.31.188.0", "ADDRESS:80 and openblas 0.3.31.188.0"),
        ("package: Open MPI jane@build.site.edu Distribution", "package: Open MPI USER@HOST Distribution"),
        ("float16, 1/2 and/or N/A", "float16, 1/2 and/or N/A"),
        ("root and localhost", "root and localhost"),
    ],
)
def test_names_are_left_out(text: str, private: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "jane")
    monkeypatch.setenv("LOGNAME", "root")
    assert without_names(text, ["node7.site.edu"]) == private
