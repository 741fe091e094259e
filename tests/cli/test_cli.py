"""The command line as users type it: under mpiexec, with its output, files and exit codes."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import h5py
import jobs
import numpy as np
import pytest
from click.testing import CliRunner
from jobs import pdgemm
from many_commands import one_line, several
from study_records import strong, study
from timelines import GOOD, timeline

from pdgemm.local.blas.processors import processor
from pdgemm.planning.machines.machine import load_machine
from pdgemm.tools.cli.commands import COMMANDS, cli
from pdgemm.tools.cli.options import BLOCK, BYTES, GRID, MNK, NUMBER, SHAPE

pytestmark = jobs.needs_mpiexec

BAD = {  # arguments, or a whole command, and the error; before options, "a.h5:/x b.h5:/y" is inserted
    "a.h5:/x a.h5:/x": "inner dimensions do not agree: op(A) is 61 x 83 on a 1 x 3 grid, op(B) is 61 x 83",
    "a.h5:/nope b.h5:/y": "a.h5 has no dataset /nope; it has",
    "none.h5:/x b.h5:/y": "none.h5: no such file",
    "a.h5:/vector b.h5:/y": "inner dimensions do not agree: op(A) is 4 x 1 on a 1 x 3 grid, op(B) is 83 x",
    "a.h5 b.h5:/y": "'a.h5' is not of the form FILE:/DATASET",
    "--grid 2x2": "a 2 x 2 grid needs 4 ranks, but there are 3",
    "--block 0": "a block size must be >= 1, got 0",
    "--block big": "'big' is not of the form 256 or 256x128",
    "--memory-limit 10 --mover ring": "bytes are needed",
    "--memory-limit much": "'much' is not of the form 2GiB",
    "--alpha 1j": "alpha = 1j is complex, but the result is float64",
    "--beta 1": "c.h5: no such file",
    "--lookahead -1": "-1 is not in the range",
    "--wrong": "--wrong",
    "-o none/c.h5:/z": "the folder",
    "text.h5:/x b.h5:/y": "text.h5 is not an HDF5 file",
    "--mover nccl": "mover 'nccl' is for matrices on a device, these are on the host",
    "--product-grid 2x2": "a grid has at most 3 ranks",
    "--algorithm 2.5d --layers 7": "it takes Pr x Pc x layers <= 3",
    "--algorithm inner --product-grid 3x1": "its grid is 1 x 1 in 3 layers",
    "--compute-type float16 --accumulate-dtype float64": "sums are float32",
    "--dtype int8": "which cannot become int8",
    f"--seed {'9' * 40} --verify": "seed",
    "--beta 1 -o a.h5:/integers": "shape mismatch: C is 83 x 3",
    "-o a.h5:/x": "a.h5:/x exists, and is A: it is replaced only with --force",
    "a.h5:/x links.h5:/y -o links.h5:/soft": "/soft exists, and is B: it is replaced only with --force",
    "--c a.h5:/c --beta 1 -o a.h5:/x": "a.h5:/x exists, and is A",
    "svd a.h5:/x -o a.h5:/x": "x/Vh cannot be saved there, because x is not a group",
    "svd a.h5:/x -o c.h5:/svd --trace c.h5": "--trace c.h5 is a file that is read or written here",
    "a.h5:/x a.h5:/flags": "a.h5:/flags holds bool; a matrix can be of ",
    "--trace ./b.h5": "--trace ./b.h5 is a file that is read or written here",
    "--trace c.h5": "--trace c.h5 is a file that is read or written here",
    "a.h5:/tall a.h5:/tall": "inner dimensions do not agree: op(A) is 3000000 x 1",
    "a.h5:/tall a.h5:/tall --transb T": "A, B, C and the buffers of the product need ",
    "generate c.h5:/x --shape 3000000x3000000": "are free in",
    "verify a.h5:/x b.h5:/y a.h5:/x": "shapes do not fit: op(A) is 61 x 83, op(B) is 83 x 29, C is 61 x 83",
    "--c a.h5:/x": "a.h5:/x is 61 x 83, but C is 61 x 29",
    "--checkpoint 10": "'10' is not of the form 10min, 90s, 2h or 3d, with its unit",
    "--checkpoint 1min --block 8": "--checkpoint cannot be combined with --block",
    "--mtbf 44h": "--mtbf needs --checkpoint",
    "--memory 3MB --block 8": "--memory cannot be combined with --block",
    "--memory 3MB --block 8 --device cuda": "--memory cannot be combined with --block or --device cuda",
    "--memory 1kB": "no tile fits 1000 B of memory per rank: 2.1 MiB (",
    "solve a.h5:/x b.h5:/y -o c.h5:/z": "A must be square for solve, but it is 61 x 83",
    "solve a.h5:/square b.h5:/y -o c.h5:/z": "A has 4 rows, but B has 83",
    "lstsq a.h5:/x b.h5:/y -o c.h5:/z": "A has 61 rows, but B has 83",
    "lstsq a.h5:/x a.h5:/x -o c.h5:/z --rcond -1": "-1.0 is not in the range x>=0",
    "eigh a.h5:/square --subset 3:4": "--subset 3:4: the eigenvalues of A are 0:3",
    "eigh a.h5:/square --subset 5": "'5' is not of the form 0:9, the first and the last index",
    "eigh a.h5:/square --subset 1:2 --values --verify": "leave out --values or --subset",
    "rank a.h5:/x --rtol nan": "--rtol must be a real number, got nan",
    "-o links.h5:/b/y --memory-limit 10": "/b/y leads by a link into another file",
}


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, jobs.Finished]:
    """Run the bad command lines, check that they change no file, and return the finished process of each."""
    before = {x: x.read_bytes() for x in folder.iterdir()}
    lines = [f"a.h5:/x b.h5:/y {line}" if line.startswith("-") else line for line in BAD]
    commands = [f"multiply -o c.h5:/z {line}" if ".h5" in line.split()[0] else line for line in lines]
    done = several(3, [line.split() for line in commands], folder)
    assert {x: x.read_bytes() for x in folder.iterdir()} == before
    return dict(zip(BAD, done))


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_nothing_is_read(said: dict[str, jobs.Finished], line: str) -> None:
    error = one_line(said[line])
    assert BAD[line] in error and "None" not in error
    assert said[line].stdout == ""  # nothing was read: a read matrix is printed


def test_debug_shows_where_an_error_came_from(folder: Path) -> None:
    run = pdgemm(1, "multiply", "a.h5:/x", "a.h5:/x", "-o", "c.h5:/z", "--debug", cwd=folder)
    assert run.returncode == 2
    assert run.stderr.count("pdgemm: error: ") == 1
    assert "in check_operands_in_files" in run.stderr  # the traceback is printed
    assert "LayoutError" in run.stderr


NO_MPI = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
OF_SLURM = {"SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("ranks", "environment", "message"),
    [
        (2, {"PDGEMM_BLAS": "mlk"}, "PDGEMM_BLAS must be auto, scipy, mkl or a library, got mlk"),
        (0, NO_MPI, "no usable MPI library"),
        (2, NO_MPI, "no usable MPI library"),  # only one rank prints
        # a launcher of another MPI library starts singletons
        (0, OF_SLURM, "the launcher started 4 processes (SLURM_STEP_NUM_TASKS), but MPI sees one"),
    ],
)
def test_an_impossible_environment_is_one_line(
    tmp_path: Path, ranks: int, environment: dict[str, str], message: str
) -> None:
    assert message in one_line(pdgemm(ranks, "info", cwd=tmp_path, **environment))


def test_commands_that_an_environment_allows(tmp_path: Path) -> None:
    """`plan` runs without an MPI library; `info` runs under mpirun if Slurm counts mpirun's daemons, not ranks."""
    run = pdgemm(2, "plan", "--shape", "9,9,9", "--ranks", "2", cwd=tmp_path, **NO_MPI)
    assert (run.returncode, run.stdout.count("machine: default")) == (0, 1)
    run = pdgemm(1, "info", cwd=tmp_path, **OF_SLURM)
    assert run.returncode == 0, run.stderr


def test_info_warns_of_kernels_for_older_processors(folder: Path) -> None:
    old = {"OPENBLAS_CORETYPE": "Nehalem", "PDGEMM_BLAS": "scipy"}
    facts = json.loads(pdgemm(2, "info", "--json", cwd=folder, **old).stdout)
    assert facts["multiplies"].endswith("(SciPy)")
    if not facts["multiplies"].startswith("OpenBLAS") or processor() in ("", "SSE"):
        pytest.skip("no OpenBLAS that can be set to older kernels")
    assert facts["multiplies"].endswith("Nehalem (SciPy)")
    host = facts["nodes"][0]["host"]
    assert facts["warnings"] and all(text.startswith(f"{host}: /") and "(SSE)" in text for text in facts["warnings"])
    assert f"warning        {facts['warnings'][0]}" in pdgemm(0, "info", cwd=folder, **old).stdout


def test_ranks_share_the_cores_unless_told_otherwise(folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    unset = {"OPENBLAS_NUM_THREADS": "", "MKL_NUM_THREADS": "", "BLIS_NUM_THREADS": ""}
    for ranks, told, expected in [(2, "", max(1, cores // 2)), (1, "", cores), (2, str(cores), cores)]:
        run = pdgemm(ranks, "info", "--json", cwd=folder, OMP_NUM_THREADS=told, **unset)
        facts = json.loads(run.stdout)
        assert (facts["ranks"], facts["nodes"][0]["ranks"]) == (ranks, ranks)
        assert facts["nodes"][0]["threads_per_rank"] == [expected]
        assert (facts["threads_set_by"] == "OMP_NUM_THREADS") == bool(told)
        assert facts["hdf5_mpi"] == h5py.get_config().mpi
    text = pdgemm(1, "info", cwd=folder).stdout
    assert all(part in text for part in ("MPI", "BLAS", "HDF5", "threads per rank", "GPU-aware", "CuPy"))


def test_all_ranks_have_the_exit_code_of_rank_0(folder: Path) -> None:
    """`plan`, which rank 0 runs without MPI, fails for lack of memory; all ranks exit with its code."""
    plan = f"{sys.executable} -m pdgemm plan --shape 9999,9999,9999 --ranks 4 --memory 1kB; echo code $?"
    run = jobs.run([str(jobs.MPIEXEC), "-n", "3", "sh", "-c", plan], cwd=folder)
    assert run.stdout.count("code 1") == 3
    assert run.stdout.count("per rank is too small") == 1


def test_each_command_has_a_help_text() -> None:
    for command in ([], *([name] for name in COMMANDS)):
        result = CliRunner().invoke(cli, [*command, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output
    said = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    listed = dict(line.split(maxsplit=1) for line in said.split("Commands:\n")[1].splitlines())
    assert listed.keys() == COMMANDS.keys() and "Multiply, solve and factor" in said
    assert all(text.endswith(".") and not text.endswith("...") and len(text.split()) <= 7 for text in listed.values())


LOADED = """
import json, sys
heavy = {"mpi4py", "mpi4py.MPI", "h5py", "scipy", "scipy.linalg", "scipy.special", "cupy", "matplotlib"}
from pdgemm.tools.cli.commands import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["pdgemm", *words.split()]
    try:
        main()
    except SystemExit as end:
        print("loaded by", words, end.code, *sorted(heavy & {*sys.modules}), file=sys.stderr)
"""


def loaded(folder: Path, *commands: str, **environment: str) -> list[str]:
    """Run commands one after another in a process; return each with its exit code and the heavy modules loaded."""
    run = jobs.run(jobs.python(0, "-c", LOADED, json.dumps(commands)), cwd=folder, **environment)
    return [x.removeprefix("loaded by ") for x in run.stderr.splitlines() if x.startswith("loaded by ")]


def test_commands_without_mpi_do_not_load_it(tmp_path: Path) -> None:
    """They load neither MPI nor other slow modules, also if a launcher started this one rank."""
    timeline(tmp_path / "t.json", GOOD)
    study(tmp_path / "s.jsonl", *strong())
    codes = {f"{name} --help": "0" for name in COMMANDS} | {
        "": "2",
        "--help": "0",
        "--version": "0",
        "nothing": "2",
        "multiply a.h5:/x b.h5:/y --wrong": "2",
        "plan --shape 300,200,100 --ranks 6": "0",
        "simulate --shape 300,200,100 --ranks 6": "0",
        "profile t.json": "0",
    }
    if find_spec("matplotlib"):
        codes["plot s.jsonl --out r.html --predict-to 8"] = "0 matplotlib"
    assert loaded(tmp_path, *codes, OMPI_COMM_WORLD_SIZE="1") == [" ".join(x) for x in codes.items()]


def test_a_product_loads_only_needed_modules(tmp_path: Path) -> None:
    """Only one module of SciPy, for BLAS, not all of its linear algebra."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.eye(3)
    product = "multiply x.h5:/x x.h5:/x -o y.h5:/y"
    assert loaded(tmp_path, product) == [f"{product} 0 h5py mpi4py mpi4py.MPI scipy"]


@pytest.mark.parametrize("separator", ["x", "X", ","])
def test_shapes_are_written_in_one_way_everywhere(separator: str) -> None:
    two, three = separator.join(["300", "20"]), separator.join(["300", "20", "7"])
    assert [x.convert(two, None, None) for x in (SHAPE, GRID, BLOCK)] == [(300, 20)] * 3
    assert MNK.convert(three, None, None) == (300, 20, 7)


def test_sizes_and_numbers() -> None:
    sizes = {"1000": 1000, "2GiB": 2 << 30, "2gb": 2_000_000_000, "1.5MiB": 3 << 19, "500MB": 500_000_000}
    sizes |= {"1e3": 1000, "4k": 4000}
    assert {text: BYTES.convert(text, None, None) for text in sizes} == sizes
    numbers = {"2": 2.0, "inf": np.inf, "2-1j": 2 - 1j, "3i": 3j, "-1e-3": -0.001}
    assert {text: NUMBER.convert(text, None, None) for text in numbers} == numbers
    assert np.isnan(NUMBER.convert("nan", None, None))
    for wrong in ("1/4", "two", "1e400"):
        with pytest.raises(click.UsageError):
            NUMBER.convert(wrong, None, None)


def test_calibrate_writes_a_machine_file_for_plans_and_products(folder: Path) -> None:
    for _ in range(3):
        run = pdgemm(2, "calibrate", "-o", "machine.json", cwd=folder)
        if "measure again when the machine is idle" not in run.stderr:  # other tests may be using the cores
            break
        assert run.returncode == 1 and not (folder / "machine.json").exists()
    assert run.returncode == 0, run.stderr
    assert "GFLOP/s" in run.stdout and "overlap" in run.stdout
    assert "wrote machine.json; to use it: plan --machine machine.json; PDGEMM_MACHINE=machine.json" in run.stdout
    machine = load_machine(folder / "machine.json")
    assert "2 ranks" in machine.name
    run = pdgemm(1, "plan", "--shape", "900,900,900", "--ranks", "12", "--machine", "machine.json", cwd=folder)
    assert run.returncode == 0 and machine.name in run.stdout
    run = pdgemm(1, "calibrate", "-o", "missing/machine.json", cwd=folder)
    assert "does not exist" in one_line(run)


def test_plan_compares_the_algorithms_of_a_collective(folder: Path) -> None:
    words = ("plan", "--collective", "all_reduce", "--ranks", "16")
    run = pdgemm(1, *words, "--words", "25e6", "--ranks-per-node", "4", cwd=folder)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("all_reduce of 25.0 M words of float64 on 16 ranks, 4 per node; machine: ")
    known = {"ring", "nearest", "two-level", "pairwise", "halving", "tree", "doubling"}
    assert {line.split()[0] for line in lines[2:9]} == known
    assert "any algorithm needs at least 46.9 M words per rank, and at least 4 rounds" in run.stdout
    assert max(map(len, lines)) <= 80
    facts = json.loads(pdgemm(1, *words, "--words", "640", "--json", cwd=folder).stdout)
    assert [x["words"] for x in facts["algorithms"] if x["algorithm"] == "ring"] == [2 * 640 * 15 // 16]
    for more, message in (
        ([*words], "needs --words"),
        ([*words, "--words", "9", "--layouts", "ideal"], "takes no option of a product, such as --layouts"),
        ([*words, "--words", "1.5"], "'1.5' is not of the form 25e6"),
        (["plan", "--ranks", "2"], "Missing option '--shape'"),
    ):
        run = pdgemm(1, *more, cwd=folder)
        assert message in one_line(run) and run.stdout == ""
