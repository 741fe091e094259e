"""Settings of a site for its jobs and launcher, and the cluster of the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import until
from slurm_jobs import BARE, CHECKOUT, FILES, LOST, SCRIPTS, SLOW_WRITE, Batch, needs_cluster, site_file, slurm
from tiers import thorough

pytestmark = needs_cluster
CLUSTER = CHECKOUT / "scripts" / "slurm_cluster.sh"


# ------------------------------------------------------------------ settings of a site
def base_python(folder: Path) -> str:
    """An environment without pdgemm."""
    (folder / "bare" / "bin").mkdir(parents=True)
    (folder / "bare" / "bin" / "python").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}")
    return str(folder / "bare")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VENV", "unset", "PDGEMM_VENV is not set: "),
        ("VENV", "/nowhere", "PDGEMM_VENV=/nowhere has no bin/python on "),
        ("VENV", "BARE", "cannot import pdgemm (ModuleNotFoundError: No module named 'pdgemm')"),
        ("LAUNCH", "", "PDGEMM_LAUNCH is not set: "),
        ("LAUNCH", "mpirun -n 2", "PDGEMM_LAUNCH='mpirun -n 2' has no {ranks}"),
        ("LAUNCH", "jsrun -n {ranks}", "PDGEMM_LAUNCH: there is no jsrun on PATH"),
        ("LAUNCH", "srun --mpi=none -n {ranks}", "starts 2 processes that each see 1 rank: "),
        ("LAUNCH", "srun --mpi=nix -n {ranks}", "fails to start 2 ranks in 120 s (srun: "),
        ("LAUNCH", "env RANKS={ranks}", "was to start 2 ranks, but there were: 1 ranks 1; "),
        ("MODULES", "openmpi", "PDGEMM_MODULES is set, but there is no command 'module'"),
        ("STRIPES", "4", "PDGEMM_STRIPES=4: lfs setstripe fails for .; "),
    ],
)
def test_a_site_file_with_missing_settings(batch: Batch, name: str, value: str, message: str) -> None:
    value = base_python(batch.folder) if value == "BARE" else value
    path = site_file(batch.folder / "site.sh", **{f"PDGEMM_{name}": value})
    job = batch.done("one_node.sbatch", PDGEMM_SITE=str(path))
    line = job.error()
    assert line.startswith(f"one_node.sbatch: error: {path}: PDGEMM_")
    assert message in line
    assert "read a.h5" not in job.out


def test_which_site_file_is_read(batch: Batch, site: str) -> None:
    """The scripts' site file names missing settings; the user's site file has precedence."""
    del batch.variables["PDGEMM_SITE"]
    batch.variables["XDG_CONFIG_HOME"] = str(batch.folder)
    assert f"{SCRIPTS}/site.sh: PDGEMM_VENV is not set" in batch.refused("one_node.sbatch")
    (batch.folder / "pdgemm").mkdir()
    shutil.copy(site, batch.folder / "pdgemm" / "site.sh")
    batch.completed("one_node.sbatch")
    message = "PDGEMM_SITE: there is no file none.sh"
    assert message in batch.refused("one_node.sbatch", PDGEMM_SITE="none.sh")


def test_modules_and_stripes(folder: Path) -> None:
    """Arguments of `module` and `lfs`; a module that does not exist."""
    path = site_file(folder / "site.sh", PDGEMM_MODULES="gcc openmpi/5", PDGEMM_STRIPES="8")
    note = f'echo "$FUNCNAME $*" >>{folder}/called'
    with path.open("a") as file:
        file.write(f'module() {{ {note}; [ "$*" != "load nope" ]; }}\nlfs() {{ {note}; }}\n')
    batch = Batch(folder, str(path))
    batch.completed("one_node.sbatch")
    called = (folder / "called").read_text().splitlines()
    assert called == ["module purge", "module load gcc", "module load openmpi/5", "lfs setstripe -c 8 ."]
    path.write_text(path.read_text().replace("openmpi/5", "nope"))
    assert "PDGEMM_MODULES: module load nope fails" in batch.refused("one_node.sbatch")


def test_the_folder_of_the_scripts_is_found_or_asked_for(batch: Batch, site: str) -> None:
    folder = batch.folder
    copy = folder / "my scripts"
    shutil.copytree(SCRIPTS, copy)
    shutil.copy(site, copy / "site.sh")
    (folder / "elsewhere").mkdir()
    del batch.variables["PDGEMM_SITE"]
    batch.variables["XDG_CONFIG_HOME"] = str(folder)
    absolute: dict[str, Any] = {name: f"{folder}/{value}" for name, value in FILES.items()}
    batch.completed(copy / "one_node.sbatch", cwd=folder / "elsewhere", **absolute)
    text = (copy / "one_node.sbatch").read_text()  # sbatch reads the script from a pipe: Slurm knows no path
    message = "job.sh and site.sh are not found; say where they are: --export=ALL,PDGEMM_SLURM="
    assert message in batch.refused("", input=text)
    batch.completed("", input=text, **absolute, PDGEMM_SLURM=str(copy))


def test_all_scripts_begin_alike() -> None:
    """Each script finds job.sh by the same lines, which cannot be in job.sh."""
    texts = {path.stem: path.read_text() for path in SCRIPTS.glob("*.sbatch")}
    assert len({*(re.findall(r"^set -euo.*?^\. ", text, re.DOTALL | re.MULTILINE)[0] for text in texts.values())}) == 1
    for name, text in texts.items():
        assert f'. "$here/job.sh" {name}.sbatch\n' in text
        signal = {"one_node": "USR1@120", "many_nodes": "USR1@120", "train": "USR1@60"}.get(name, "TERM@60")
        assert f"#SBATCH --signal=B:{signal}\n" in text


# ------------------------------------------------------------------ srun
@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with MPICH, whose ranks srun starts by PMI2; otherwise it equals this environment."""
    if not (Path(sys.prefix) / "bin" / "pip").exists() or "pmi2" not in slurm_protocols():
        pytest.skip("needs pip, and a Slurm that speaks PMI2")
    folder = tmp_path_factory.mktemp("mpich")
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    installed = subprocess.run([*pip, "mpich==5.0.2"], capture_output=True, text=True, timeout=120, check=False)
    if installed.returncode:
        pytest.skip(f"the wheel of MPICH cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "all_else.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    (folder / "bin" / "pdgemm").write_text(f"#!{python}\nfrom pdgemm.tools.cli.commands import main\nmain()\n")
    (folder / "bin" / "pdgemm").chmod(0o755)
    return str(folder)


def slurm_protocols() -> str:
    run = subprocess.run(["srun", "--mpi=list"], env=BARE, capture_output=True, text=True, timeout=60, check=False)
    return run.stdout + run.stderr


@thorough
def test_srun_with_pmi2(folder: Path, mpich: str) -> None:
    launch = "srun --mpi=pmi2 -n {ranks}"
    batch = Batch(folder, str(site_file(folder / "site.sh", PDGEMM_VENV=mpich, PDGEMM_LAUNCH=launch)))
    job = batch.completed("many_nodes.sbatch", shape=(2, 2))
    assert f"4 ranks by '{launch}'" in job.out
    batch.check_product()
    job = batch.done("many_nodes.sbatch", shape=(2, 2), OPTIONS="--grid 3x3")
    # srun prints errors of its own, too
    assert "a 3 x 3 grid needs 9 ranks, but there are 4" in job.error("pdgemm: error: ")
    with batch.unharmed():
        slow = batch.submit("many_nodes.sbatch", shape=(2, 2), **batch.changed(SLOW_WRITE))
        slow.printed("about to rename")
        out = slow.terminated().out
        assert "pdgemm: ended by SIG" in out and LOST in out


def test_srun_with_pmix(folder: Path, site: str) -> None:
    words = ["srun", "--mpi=pmix", "-n", "1", "true"]  # `srun --mpi=list` names pmix even if its library is missing
    if "--bind-to" not in Path(site).read_text() or subprocess.run(words, env=BARE, timeout=60, check=False).returncode:
        pytest.skip("needs Open MPI, and a Slurm that speaks PMIx")
    batch = Batch(folder, str(site_file(folder / "site.sh", PDGEMM_LAUNCH="srun --mpi=pmix -n {ranks}")))
    assert "4 ranks by 'srun --mpi=pmix " in batch.completed("many_nodes.sbatch", shape=(2, 2)).out
    batch.check_product()


# ------------------------------------------------------------------ the cluster
def cluster(*words: str | Path) -> Any:
    return subprocess.run([CLUSTER, *words], env=BARE, capture_output=True, text=True, timeout=60, check=False)


def processes_with(text: str) -> list[str]:
    """Return names of processes whose environment or command line contains a text."""
    names = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (path / "environ").read_bytes() + (path / "cmdline").read_bytes():
                names.append((path / "comm").read_text().strip())
        except OSError:
            pass
    return names


@thorough
def test_two_clusters_at_once_and_nothing_stays(tmp_path: Path) -> None:
    """A second cluster runs during the tests; stopped during a job, it leaves no process."""
    there = tmp_path / "cluster"
    assert cluster("up", there).returncode == 0
    try:
        again = cluster("up", there)
        assert again.returncode == 1 and "a cluster runs in " in again.stderr
        text = "#!/bin/bash\ntrap '' TERM\nsetsid sleep 600 & sleep 600 & echo started; wait; wait\n"
        conf = str(there / "slurm.conf")
        job = slurm("sbatch", "--parsable", cwd=tmp_path, input=text, SLURM_CONF=conf).strip()
        out = tmp_path / f"slurm-{job}.out"
        assert until(lambda: out.exists() and out.read_text(), 20), slurm("squeue", SLURM_CONF=conf)
        assert {"munged", "slurmctld", "slurmd", "sleep"} <= set(processes_with(str(there)))
        assert "JobState=RUNNING" in slurm("scontrol", "show", "job", job, SLURM_CONF=conf)
    finally:
        down = cluster("down", there)
    assert down.returncode == 0, down.stderr
    assert [name for name in processes_with(str(there)) if name != "pytest"] == []
    assert cluster("down", there).returncode == 0
    assert "n[1-2]" in slurm("sinfo")  # the tests' cluster still runs
    for words in ([], ["up"], ["sideways", there], ["down", there / "nothing"]):
        assert cluster(*words).returncode == 2
