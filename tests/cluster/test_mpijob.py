"""slurm/mpijob.yaml: the fields of the MPI operator, consistent numbers, and a command that runs unchanged."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import pytest
from problems import TOLERANCE, gemm_error

from pdgemm.support.launcher import outside_job
from pdgemm.tools.cli.commands import cli

yaml = pytest.importorskip("yaml")
MANIFEST = Path(__file__).resolve().parents[2] / "slurm" / "mpijob.yaml"
# fields of MPIJobSpec and RunPolicy in kubeflow.org/v2beta1
SPEC = {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath", "launcherCreationPolicy"}
SPEC |= {"mpiImplementation", "runLauncherAsWorker"}
RUN_POLICY = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy"}
RUN_POLICY |= {"suspend", "managedBy"}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    made = yaml.safe_load(MANIFEST.read_text())
    assert isinstance(made, dict)
    return made


def container(job: dict[str, Any], kind: str) -> dict[str, Any]:
    (only,) = job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def words_of(job: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return mpirun's options, and the words of pdgemm."""
    command = container(job, "Launcher")["command"]
    assert command[0] == "mpirun"
    start = command.index("pdgemm")
    options = command[1:start]
    return dict(zip(options[::2], options[1::2], strict=True)), command[start + 1 :]


def test_the_fields_are_those_of_the_operator(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert set(spec) <= SPEC
    assert set(spec["runPolicy"]) <= RUN_POLICY
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replicas in spec["mpiReplicaSpecs"].values():
        assert set(replicas) == {"replicas", "restartPolicy", "template"}
        assert replicas["restartPolicy"] in ("Never", "OnFailure")
    assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1


def test_the_numbers_agree(job: dict[str, Any]) -> None:
    spec, (options, _) = job["spec"], words_of(job)
    assert int(options["-n"]) == spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
    name, threads = options["-x"].split("=")
    limits = container(job, "Worker")["resources"]["limits"]
    assert name == "OMP_NUM_THREADS"
    assert int(limits["cpu"]) == spec["slotsPerWorker"] * int(threads)
    for kind in ("Launcher", "Worker"):
        resources = container(job, kind)["resources"]
        assert resources["requests"] == resources["limits"]
        assert set(resources["limits"]) == {"cpu", "memory"}


def test_volumes_are_mounted_where_the_command_looks(job: dict[str, Any]) -> None:
    volumes = {x["name"]: x for x in job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]}
    mounts = {x["mountPath"]: volumes[x["name"]] for x in container(job, "Worker")["volumeMounts"]}
    assert "persistentVolumeClaim" in mounts["/data"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert [word for word in words_of(job)[1] if word.startswith("/")] == [
        "/data/a.h5:/x",
        "/data/b.h5:/y",
        "/data/c.h5:/z",
    ]


def test_its_command_line_is_one_of_pdgemm(job: dict[str, Any]) -> None:
    name, *arguments = words_of(job)[1]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    asked = command.make_context(name, arguments).params
    assert asked["verified"]
    assert (asked["a"].path, asked["a"].name) == ("/data/a.h5", "/x")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on PATH")
def test_its_command_runs(job: dict[str, Any], tmp_path: Path) -> None:
    """The command of the job runs, with only its hosts, its number of ranks and its data folder replaced."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False)
    if "Open MPI" not in version.stdout + version.stderr:
        pytest.skip("the command is for Open MPI's mpirun")
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((31, 17)), rng.standard_normal((17, 23))
    for name, dataset, matrix in (("a", "x", a), ("b", "y", b)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[dataset] = matrix
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    ranks = words_of(job)[0]["-n"]
    instead = {"/etc/mpi/hostfile": str(tmp_path / "hostfile"), ranks: "2"}
    command = [instead.get(x, x).replace("/data", str(tmp_path)) for x in container(job, "Launcher")["command"]]
    told = {x["name"]: x["value"] for x in container(job, "Launcher")["env"]}
    run = subprocess.run(command, env=outside_job() | told, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ": ok" in run.stdout
    with h5py.File(tmp_path / "c.h5") as file:
        assert gemm_error(file["z"][...], 1, a, b) <= TOLERANCE
