"""The command line as users type it: under mpiexec, its output, files and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import click
import h5py
import jobs
import numpy as np
import pytest
from click.testing import CliRunner
from jobs import pdgemm
from many_commands import one_line, read, several
from problems import TOLERANCE, gemm_error
from processes import TEXTS, running, started
from study_records import strong, study
from timelines import GOOD, timeline

from pdgemm.local.blas.processors import processor
from pdgemm.planning.machines.machine import load_machine
from pdgemm.support.launcher import outside_job
from pdgemm.tools.cli.commands import COMMANDS, cli
from pdgemm.tools.cli.param_types import BLOCK, BYTES, GRID, MNK, NUMBER, SHAPE

pytestmark = jobs.needs_mpiexec


AB = "a.h5:/x", "b.h5:/y"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.h5:/x (61 x 83) and b.h5:/y (83 x 29), written by plain h5py."""
    made = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(1)
    with h5py.File(made / "a.h5", "w") as file:
        file["x"] = rng.standard_normal((61, 83))
        file["vector"] = np.zeros(4)
        file["integers"] = np.ones((83, 3), "i4")
        file["long"] = np.ones((83, 3), "i8")
        file["c"] = np.ones((61, 29))
        file["square"] = np.eye(4)
        file.create_dataset("tall", (3_000_000, 1), "f8")  # without elements: nothing is written
    (made / "text.h5").write_text("no matrix\n")
    with h5py.File(made / "links.h5", "w") as file:
        file["b"] = h5py.ExternalLink("b.h5", "/")
        file["soft"] = h5py.SoftLink("/y")
        file["y"] = np.ones((83, 29))
    with h5py.File(made / "b.h5", "w") as file:
        file["y"] = rng.standard_normal((83, 29))
    return made


def operands(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return read(folder / "a.h5", "x"), read(folder / "b.h5", "y")


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, ["--block", "7"]), (4, ["--block", "5x11", "--grid", "4x1", "--mover", "ring"])]
)
def test_multiply_on_any_number_of_ranks(folder: Path, ranks: int, options: list[str]) -> None:
    run = pdgemm(ranks, "multiply", *AB, "-o", f"c{ranks}.h5:/z", "--verify", *options, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "residual" in run.stdout
    assert "as predicted; lower bound " in run.stdout
    assert run.stdout.count("wrote") == 1  # one rank speaks
    assert gemm_error(read(folder / f"c{ranks}.h5", "z"), 1, *operands(folder)) <= TOLERANCE


def test_types_of_operands_and_of_sums(folder: Path) -> None:
    """Operands of float64 that are rounded: C is right, but not to double precision.  Small types; types by name."""
    rounded = ["float32", "tf32", "float16", "bfloat16", "ozaki-4"]
    ones = ["--shape", "300x40", "--kind", "ones", "--dtype"]
    *products, _, _, inner, mixed, named = several(
        3,
        [
            *(["multiply", *AB, "-o", f"{name}.h5:/z", "--compute-type", name, "--verify"] for name in rounded),
            ["generate", "i8.h5:/m", *ones, "int8"],
            ["generate", "f16.h5:/m", *ones, "float16"],
            ["multiply", *["i8.h5:/m"] * 2, "-o", "i32.h5:/m", "--transa", "T", "--algorithm", "inner", "--verify"],
            ["multiply", "f16.h5:/m", "i8.h5:/m", "-o", "d.h5:/m", "--transb", "T", "--accumulate-dtype", "float64"],
            ["multiply", "a.h5:/x", "a.h5:/integers", "-o", "i.h5:/z", "--dtype", "float32"],
        ],
        folder,
    )
    assert [x.returncode for x in (*products, inner, mixed, named)] == [0] * 8, (products, inner, mixed, named)
    assert all(f"of {name}" in run.stdout for name, run in zip(rounded[1:], products[1:]))
    assert "int32, by inner" in inner.stdout
    assert inner.stdout.count("read i8.h5") == 1
    assert "redistributed" not in inner.stdout  # B is a view of A, and both lie as "inner" wants them
    assert ", float16, added up in float64, by " in mixed.stdout  # the file holds float16
    for name, dtype, value in (("i32", "int32", 300), ("d", "float16", 40)):
        c = read(folder / f"{name}.h5", "m")
        assert c.dtype == dtype and (c == value).all()
    c = read(folder / "i.h5", "z")
    assert c.dtype == "float32"
    assert gemm_error(c, 1, operands(folder)[0].astype("f"), np.ones((83, 3), "f")) <= TOLERANCE


def test_the_whole_round(tmp_path: Path) -> None:
    """generate, multiply with all options, verify; in JSON."""
    shapes = {"a": ["70x50"], "b": ["90x50", "--kind", "normal", "--seed", "3"], "c": ["70x90", "--seed", "9"]}
    scalars = ["--alpha", "2-1j", "--beta", "0.5", "--transb", "C"]
    both = ["a.h5:/m", "b.h5:/m"]
    check = ["verify", *both, "d.h5:/deep/m", "--c0", "c.h5:/m", *scalars]
    options = ["--block", "8x9", "--memory-limit", "40KiB", "--verify", "--json"]
    *generated, product, right, wrong = several(
        4,
        [
            *(["generate", f"{x}.h5:/m", "--dtype", "complex128", "--json", "--shape", *shapes[x]] for x in shapes),
            ["multiply", *both, "-o", "d.h5:/deep/m", "--c", "c.h5:/m", *scalars, *options],
            check,
            [*check, "--alpha", "2.1"],
        ],
        tmp_path,
    )
    assert [json.loads(x.stdout)["wrote"]["dtype"] for x in generated] == ["complex128"] * 3
    assert product.returncode == 0, product.stderr
    facts = json.loads(product.stdout)
    assert facts["product"]["as_predicted"]
    assert facts["product"]["per_rank"]["extra_bytes"]["max"] <= 40 * 1024
    assert facts["verify"]["passed"]
    assert [x["method"] for x in facts["read"]] == ["mpi-io"] * 3
    a, b, c = (read(tmp_path / f"{name}.h5", "m") for name in "abc")
    d = read(tmp_path / "d.h5", "deep/m")
    assert gemm_error(d, 2 - 1j, a, b.conj().T, 0.5, c) <= TOLERANCE
    assert (right.returncode, wrong.returncode, "WRONG" in wrong.stdout) == (0, 1, True)


def test_one_dataset_as_a_and_b_is_read_once(folder: Path) -> None:
    """Whatever its names are, and each op of it; so does `verify`.  Twice if a view takes too large a buffer.

    The grid of the product may be another than that of the matrices.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((13, 13)) + 1j * rng.standard_normal((13, 13))
    with h5py.File(folder / "once.h5", "w") as file:
        file["x"] = x
        file["soft"] = h5py.SoftLink("/x")
        file["other"] = x
    ops = {"N": x, "T": x.T, "C": x.conj().T}
    both = [(a, b) for a in ops for b in ops]
    twice = ["once.h5:/x", "./once.h5:/soft", "--block", "2x3", "--verify", "--json"]
    gram = ["multiply", "a.h5:/x", "a.h5:/x", "--transb", "T", "-o", "limit.h5:/z", "--json"]
    summa, cannon = ["--mover", "mpi", "--algorithm", "summa"], ["--algorithm", "cannon", "--product-grid", "3x2"]
    layers = ["--algorithm", "2.5d", "--product-grid", "1x2", "--layers", "2", "--verify"]
    *products, checked, other, free, tight, layered, refused = several(
        4,
        [
            *(["multiply", *twice, "-o", f"o{a}{b}.h5:/z", "--transa", a, "--transb", b] for a, b in both),
            ["verify", "once.h5:/x", "once.h5:/x", "oNT.h5:/z", "--transb", "T", "--json"],
            ["multiply", "once.h5:/x", "once.h5:/other", "-o", "t.h5:/z", "--json"],
            [*gram, *summa],
            [*gram, *summa, "--memory-limit", "9kB"],
            [*gram, *layers],
            [*gram, *cannon],
        ],
        folder,
    )
    for (a, b), run in zip(both, products):
        assert run.returncode == 0, run.stderr
        facts = json.loads(run.stdout)
        assert [r["bytes"] for r in facts["read"]] == [x.nbytes]
        assert facts["product"]["as_predicted"]
        assert gemm_error(read(folder / f"o{a}{b}.h5", "z"), 1, ops[a], ops[b]) <= TOLERANCE
    assert [len(json.loads(x.stdout)["read"]) for x in (checked, other, free, tight)] == [2, 2, 1, 2]
    product = json.loads(layered.stdout)["product"]
    assert (product["algorithm"], product["grid"], product["layers"]) == ("2.5d", [1, 2], 2)
    assert product["as_predicted"] and product["predicted_seconds"] > 0 < product["lower_bound_words"]
    assert "one side of its grid divides the other" in one_line(refused)


def test_what_replaces_a_dataset(folder: Path) -> None:
    """A result replaces what pdgemm wrote, and C on entry; anything else with --force only."""
    with h5py.File(folder / "own.h5", "w") as file:
        file["x"] = file["c"] = file["e"] = np.eye(5)
        file["kept"] = np.ones(3)
        layout = h5py.VirtualLayout((5, 5), "f8")
        layout[:] = h5py.VirtualSource("own.h5", "new", (5, 5))
        file.create_virtual_dataset("all_of_new", layout)
    product = ["multiply", "own.h5:/x", "own.h5:/x", "-o"]
    commands = [
        ([*product, "own.h5:/new"], 0),
        ([*product, "own.h5:/new", "--alpha", "2"], 0),
        ([*product, "own.h5:/c", "--beta", "3"], 0),
        ([*product, "own.h5:/e", "--beta", "-3"], 0),
        ([*product, "own.h5:/x", "--beta", "3"], 2),  # C on entry, but A as well
        ([*product, "own.h5:/kept"], 2),
        (["multiply", "own.h5:/all_of_new", "own.h5:/x", "-o", "own.h5:/new"], 2),  # which has the elements of A
        ([*product, "own.h5:/x", "--alpha", "7", "--force"], 0),
        (["generate", "own.h5:/kept", "--shape", "2x2"], 2),
        (["generate", "own.h5:/c", "--shape", "2x2", "--kind", "ones"], 0),
        (["generate", "own.h5:/kept", "--shape", "2x2", "--kind", "ones", "--force"], 0),
    ]
    done = several(2, [words for words, _ in commands], folder)
    assert [x.returncode for x in done] == [code for _, code in commands], done
    ones, eye = np.ones((2, 2)), np.eye(5)
    for name, expected in (("new", 2 * eye), ("c", ones), ("e", -2 * eye), ("x", 7 * eye), ("kept", ones)):
        assert np.array_equal(read(folder / "own.h5", name), expected), name


BAD = [
    (["a.h5:/x", "a.h5:/x"], "inner dimensions do not agree: op(A) is 61 x 83 on a 1 x 3 grid, op(B) is 61 x 83"),
    (["a.h5:/nope", "b.h5:/y"], "a.h5 has no dataset /nope; it has"),
    (["none.h5:/x", "b.h5:/y"], "none.h5: no such file"),
    (["a.h5:/vector", "b.h5:/y"], "inner dimensions do not agree: op(A) is 4 x 1 on a 1 x 3 grid, op(B) is 83 x"),
    (["a.h5:/x", "a.h5:/integers"], "B has dtype int32; supported: float8_e4m3fn"),
    (["a.h5", "b.h5:/y"], "'a.h5' is not of the form FILE:/DATASET"),
    ([*AB, "--grid", "2x2"], "a 2 x 2 grid needs 4 ranks, but there are 3"),
    ([*AB, "--block", "0"], "a block size must be >= 1, got 0"),
    ([*AB, "--block", "big"], "'big' is not of the form 256 or 256x128"),
    ([*AB, "--memory-limit", "10", "--mover", "ring"], "bytes are needed"),
    ([*AB, "--memory-limit", "much"], "'much' is not of the form 2GiB"),
    ([*AB, "--alpha", "1j"], "alpha = 1j is complex, but the result is float64"),
    ([*AB, "--beta", "1"], "c.h5: no such file"),
    ([*AB, "--lookahead", "-1"], "-1 is not in the range"),
    ([*AB, "--wrong"], "--wrong"),
    ([*AB, "-o", "none/c.h5:/z"], "the folder"),
    (["text.h5:/x", "b.h5:/y"], "text.h5 is not an HDF5 file"),
    ([*AB, "--mover", "nccl"], "mover 'nccl' is for matrices on a device, these are on the host"),
    ([*AB, "--product-grid", "2x2"], "a grid has at most 3 ranks"),
    ([*AB, "--algorithm", "2.5d", "--layers", "7"], "it takes Pr x Pc x layers <= 3"),
    ([*AB, "--algorithm", "inner", "--product-grid", "3x1"], "its grid is 1 x 1 in 3 layers"),
    ([*AB, "--compute-type", "float16", "--accumulate-dtype", "float64"], "sums are float32"),
    ([*AB, "--dtype", "int8"], "which cannot become int8"),
    ([*AB, "--seed", "9" * 40, "--verify"], "seed"),
    ([*AB, "--beta", "1", "-o", "a.h5:/integers"], "shape mismatch: C is 83 x 3"),
    ([*AB, "-o", "a.h5:/x"], "a.h5:/x exists, and is A: it is replaced only with --force"),
    (["a.h5:/x", "links.h5:/y", "-o", "links.h5:/soft"], "/soft exists, and is B: it is replaced only with --force"),
    ([*AB, "--c", "a.h5:/c", "--beta", "1", "-o", "a.h5:/x"], "a.h5:/x exists, and is A"),
    ([*AB, "-o", "a.h5:/vector"], "a.h5:/vector exists, and was not written by pdgemm"),
    ([*AB, "-o", "a.h5:/x/q"], "x/q cannot be saved there, because x is not a group"),
    (["svd", "a.h5:/x", "-o", "a.h5:/x"], "x/Vh cannot be saved there, because x is not a group"),
    (["svd", "a.h5:/x", "-o", "c.h5:/svd", "--trace", "c.h5"], "--trace c.h5 is a file that is read or written here"),
    (["a.h5:/x", "a.h5:/long"], "a.h5:/long holds int64; a matrix can be of "),
    ([*AB, "--trace", "a.h5"], "--trace a.h5 is a file that is read or written here"),
    ([*AB, "--trace", "./b.h5"], "--trace ./b.h5 is a file that is read or written here"),
    ([*AB, "--trace", "c.h5"], "--trace c.h5 is a file that is read or written here"),
    (["a.h5:/tall", "a.h5:/tall"], "inner dimensions do not agree: op(A) is 3000000 x 1"),
    (["a.h5:/tall", "a.h5:/tall", "--transb", "T"], "A, B, C and the buffers of the product need "),
    (["generate", "a.h5:/x", "--shape", "3x3"], "a.h5:/x exists, and was not written by pdgemm: it is "),
    (["generate", "c.h5:/x", "--shape", "3000000x3000000"], "are free in"),
    (
        ["verify", "a.h5:/x", "b.h5:/y", "a.h5:/x"],
        "shapes do not fit: op(A) is 61 x 83, op(B) is 83 x 29, C is 61 x 83",
    ),
    ([*AB, "--c", "a.h5:/x"], "a.h5:/x is 61 x 83, but C is 61 x 29"),
    ([*AB, "--checkpoint", "10"], "'10' is not of the form 10min, 90s, 2h or 3d, with its unit"),
    (["solve", "a.h5:/x", "b.h5:/y", "-o", "c.h5:/z"], "A must be square for solve, but it is 61 x 83"),
    (["solve", "a.h5:/square", "b.h5:/y", "-o", "c.h5:/z"], "A has 4 rows, but B has 83"),
    (["lstsq", "a.h5:/x", "b.h5:/y", "-o", "c.h5:/z"], "A has 61 rows, but B has 83"),
    (["lstsq", "a.h5:/x", "a.h5:/x", "-o", "c.h5:/z", "--rcond", "-1"], "-1.0 is not in the range x>=0"),
    (["eigh", "a.h5:/square", "--subset", "3:4"], "--subset 3:4: the eigenvalues of A are 0:3"),
    (["eigh", "a.h5:/square", "--subset", "5"], "'5' is not of the form 0:9, the first and the last index"),
    (["eigh", "a.h5:/square", "--subset", "1:2", "--values", "--verify"], "leave out --values or --subset"),
    (["rank", "a.h5:/x", "--rtol", "nan"], "--rtol must be a real number, got nan"),
    (
        [*AB, "-o", "links.h5:/b/y", "--memory-limit", "10"],
        "/b/y leads by a link into another file",
    ),
]


@pytest.fixture(scope="module")
def refused(folder: Path) -> list[jobs.Finished]:
    """What is said to bad command lines, which change no file."""
    product = ["multiply", "-o", "c.h5:/z"]
    before = {x: x.read_bytes() for x in folder.iterdir()}
    done = several(3, [[*(product if x[0].endswith(".h5") or ":" in x[0] else []), *x] for x, _ in BAD], folder)
    assert {x: x.read_bytes() for x in folder.iterdir()} == before
    return done


@pytest.mark.parametrize(("number", "message"), [*enumerate(x for _, x in BAD)])
def test_bad_input_is_one_line_and_nothing_is_read(refused: list[jobs.Finished], number: int, message: str) -> None:
    said = one_line(refused[number])
    assert message in said and "None" not in said
    assert refused[number].stdout == ""  # no matrix was read


def test_debug_shows_where_an_error_came_from(folder: Path) -> None:
    run = pdgemm(1, "multiply", "a.h5:/x", "a.h5:/x", "-o", "c.h5:/z", "--debug", cwd=folder)
    assert run.returncode == 2
    assert run.stderr.count("pdgemm: error: ") == 1
    assert "in check_operands_in_files" in run.stderr  # the place
    assert "LayoutError" in run.stderr


def test_an_unexpected_error_on_one_rank_ends_the_job(folder: Path, tmp_path: Path) -> None:
    """A bug that only one rank meets must not leave the others waiting."""
    bug = jobs.with_plant(
        tmp_path,
        "from pdgemm.support import launcher\n"
        "if launcher.launched_rank() == 1:\n"
        "    import pdgemm.algorithms.products.accumulator\n"
        "    def broken(*args): raise RuntimeError('a bug')\n"
        "    pdgemm.algorithms.products.accumulator.prepare = broken\n",
    )
    run = pdgemm(2, "multiply", *AB, "-o", "c.h5:/z", cwd=folder, **bug)
    assert run.returncode not in (0, 1, 2)
    assert "RuntimeError: a bug" in run.stderr
    assert not (folder / "c.h5").exists()


def test_info_warns_of_kernels_for_older_processors(folder: Path) -> None:
    old = {"OPENBLAS_CORETYPE": "Nehalem", "PDGEMM_BLAS": "scipy"}
    facts = json.loads(pdgemm(2, "info", "--json", cwd=folder, **old).stdout)
    assert facts["multiplies"].endswith("(SciPy)")
    if not facts["multiplies"].startswith("OpenBLAS") or processor() in ("", "SSE"):
        pytest.skip("there is no OpenBLAS here that could be told to use older kernels")
    assert facts["multiplies"].endswith("Nehalem (SciPy)")
    host = facts["nodes"][0]["host"]
    assert facts["warnings"] and all(text.startswith(f"{host}: /") and "(SSE)" in text for text in facts["warnings"])
    assert f"warning        {facts['warnings'][0]}" in pdgemm(0, "info", cwd=folder, **old).stdout


def test_a_blas_that_is_not_known_is_refused(folder: Path) -> None:
    run = pdgemm(2, "info", cwd=folder, PDGEMM_BLAS="mlk")
    assert "PDGEMM_BLAS must be auto, scipy, mkl or a library, got mlk" in one_line(run)


def test_processes_that_do_not_know_of_each_other_are_told(folder: Path) -> None:
    """A launcher of another MPI library starts singletons; mpirun's daemons, which srun starts, are no processes."""
    several_of_slurm = {"SLURM_STEP_NUM_TASKS": "4"}
    run = pdgemm(0, "info", cwd=folder, **several_of_slurm)
    assert "the launcher started 4 processes (SLURM_STEP_NUM_TASKS), but MPI sees one" in one_line(run)
    run = pdgemm(1, "info", cwd=folder, **several_of_slurm)
    assert run.returncode == 0, run.stderr


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
    """Of commands, one after the other in a process: each, its exit code, and the heavy modules that are loaded."""
    run = jobs.run(jobs.python(0, "-c", LOADED, json.dumps(commands)), cwd=folder, **environment)
    return [x.removeprefix("loaded by ") for x in run.stderr.splitlines() if x.startswith("loaded by ")]


def test_what_needs_no_mpi_loads_none(tmp_path: Path) -> None:
    """Nor what else takes time to load.  A launcher that started one rank changes nothing."""
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


def test_a_product_loads_only_what_it_needs(tmp_path: Path) -> None:
    """Of SciPy a module that knows BLAS, not all of its linear algebra."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.eye(3)
    product = "multiply x.h5:/x x.h5:/x -o y.h5:/y"
    assert loaded(tmp_path, product) == [f"{product} 0 h5py mpi4py mpi4py.MPI scipy"]


def test_matrices_twenty_times_as_large_as_the_memory(tmp_path: Path) -> None:
    """A rank takes what it is allowed, and 16 MiB for all that comes with it; what is read was planned."""
    (m, k), limit, most = (4300, 300), 4 << 20, 16 << 20
    for name, shape in (("small.h5", (64, 64)), ("x.h5", (m, k))):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.random.default_rng(k).standard_normal(shape)
    peaks = []
    for file, out in (("small.h5", "d.h5"), ("x.h5", "c.h5")):
        words = ["multiply", f"{file}:/x", f"{file}:/x", "--transb", "T", "-o", f"{out}:/c", "--memory", "4MiB"]
        run = pdgemm(2, *words, "--json", cwd=tmp_path, PDGEMM_NODE_MEMORY="0")  # else others' parts count, too
        assert run.returncode == 0, run.stderr
        product = json.loads(run.stdout)["product"]
        peaks.append(product["peak"])
        assert [product[x] == product["plan"][x] for x in ("bytes_read", "bytes_written")] == [True, True]
    assert 8 * (2 * m * k + m * m) >= 2 * 20 * limit
    assert product["plan"]["bytes_per_rank"] <= limit and peaks[1] - peaks[0] <= limit + most
    A, rows = read(tmp_path / "x.h5", "x"), [0, m // 3, m - 1]
    assert gemm_error(read(tmp_path / "c.h5", "c")[rows], 1, A[rows], A.T) <= TOLERANCE


@pytest.mark.parametrize("way", [[], ["--memory", "3MB", "--trace", "t.json"]])
def test_a_page_of_a_product(folder: Path, tmp_path: Path, way: list[str]) -> None:
    """It has what was printed, a timeline and the time of each rank; no file stays that nobody named.

    Its heading names the file, and the operands as they enter the product; training is not mentioned.
    """
    words = ["multiply", f"{folder}/b.h5:/y", f"{folder}/a.h5:/x", "-o", "c.h5:/c", "--report", "r.html", *way]
    words += ["--transa", "t", "--transb", "c"]
    run = pdgemm(2, *words, "--verify", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "wrote r.html"
    page = (tmp_path / "r.html").read_text()
    heading = "<h1>c.h5:/c: C (29 x 61) := A^T (29 x 83) B^H</h1>"
    for said in (heading, "residual ", "wrote c.h5:/c (29 x 61 ", "econds of each rank; rank ", "<svg", ">verify<"):
        assert said in page, said
    assert "training" not in page
    assert ("lets it read" in page) == (way == [])  # the words of one product from rank to rank
    assert sorted(x.name for x in tmp_path.iterdir()) == ["c.h5", "r.html", *["t.json"] * bool(way)]
    for name, said in (("r.pdf", "a report is a file with the ending .html"), ("none/r.html", "the folder")):
        bad = pdgemm(1, *words[:6], name, "-o", "d.h5:/c", cwd=tmp_path)
        assert said in one_line(bad) and not (tmp_path / "d.h5").exists()


def test_in_parts_and_verified(folder: Path, tmp_path: Path) -> None:
    """The plan comes first; C on entry may be the output."""
    shutil.copy(folder / "a.h5", tmp_path / "c.h5")
    words = ["multiply", f"{folder}/a.h5:/x", f"{folder}/b.h5:/y", "-o", "c.h5:/c", "--beta", "2", "--memory", "3MB"]
    run = pdgemm(2, *words, "--verify", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert said[0].startswith("1 tile of C of at most 61 x 29, each by 1 panel of width <= 83: ")
    assert "as planned" in said[2] and "NOT" not in said[2]
    assert said[3].startswith("residual ") and said[3].endswith("ok") and said[4].startswith("wrote c.h5:/c (61 x 29 ")
    with h5py.File(folder / "a.h5") as a, h5py.File(folder / "b.h5") as b, h5py.File(tmp_path / "c.h5") as c:
        assert gemm_error(c["c"][()], 1, a["x"][()], b["y"][()], 2, a["c"][()]) <= TOLERANCE
        assert "vector" in c and c["c"].attrs["pdgemm_checksum"]
    refused = {
        "--block 8": "--memory does not go with --block",
        "--block 8 --device cuda": "--memory does not go with --block or --device cuda",
        "--memory-limit 10 --mover ring": "memory limit 10 bytes per rank is too small",
        "--memory 1kB": "no tile fits 1000 B of memory per rank: 2.1 MiB (",
    }
    for bad, message in zip(several(2, [[*words, *x.split()] for x in refused], tmp_path), refused.values()):
        assert message in one_line(bad)


def test_the_plan_of_a_product_in_parts(tmp_path: Path) -> None:
    """Where no other one fits: an answer on standard output, in text and as JSON, with an exit code of its own."""
    words = "plan --shape 20000,20000,20000 --ranks 4 --memory"
    few, less = (pdgemm(0, *words.split(), memory, cwd=tmp_path) for memory in ("100MiB", "1MiB"))
    answer = pdgemm(0, *words.split(), "100MiB", "--json", cwd=tmp_path)
    assert [(run.returncode, run.stderr) for run in (few, less, answer)] == [(1, "")] * 3
    said, less_said = (" ".join(run.stdout.split()) for run in (few, less))
    assert said.startswith("100.0 MiB per rank is too small: at least 2.2 GiB are needed on 4 ranks, of which")
    assert re.search(r" on (\d+) ranks it fits, with \S+ MiB per rank ", said)
    assert re.search(r"would multiply matrices in files in \d+ tiles of C of at most .* times the lower bound$", said)
    assert "products of files in parts, `pdgemm multiply --memory`, need 2.1 MiB per rank" in less_said
    facts = json.loads(answer.stdout)
    assert (facts["fits"], facts["candidates"]) == (False, [])
    assert facts["on_more_ranks"]["bytes_per_rank"] <= facts["memory"] < facts["needed_bytes_per_rank"]
    assert facts["in_parts"]["bytes_per_rank"] <= facts["memory"]
    fits = f"plan --shape 20000,20000,20000 --memory 100MiB --ranks {facts['on_more_ranks']['ranks']}"
    assert pdgemm(0, *fits.split(), cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("separator", ["x", "X", ","])
def test_shapes_are_written_in_one_way_everywhere(separator: str) -> None:
    two, three = separator.join(["300", "20"]), separator.join(["300", "20", "7"])
    assert [x.convert(two, None, None) for x in (SHAPE, GRID, BLOCK)] == [(300, 20)] * 3
    assert MNK.convert(three, None, None) == (300, 20, 7)


def test_sizes_and_numbers() -> None:
    sizes = {"1000": 1000, "2GiB": 2 << 30, "2gb": 2_000_000_000, "1.5MiB": 3 << 19, "500MB": 500_000_000}
    sizes |= {"1e3": 1000, "4k": 4000}
    assert {text: BYTES.convert(text, None, None) for text in sizes} == sizes
    numbers = {"2": 2.0, "1/4": 0.25, "inf": np.inf, "2-1j": 2 - 1j, "3i": 3j, "-1e-3": -0.001}
    assert {text: NUMBER.convert(text, None, None) for text in numbers} == numbers
    assert np.isnan(NUMBER.convert("nan", None, None))
    for wrong in ("1/0", "two", "1//2"):
        with pytest.raises(click.UsageError):
            NUMBER.convert(wrong, None, None)


def test_nobody_reading_the_output_is_no_reason_to_lose_the_result(folder: Path) -> None:
    command = f"{sys.executable} -m pdgemm multiply a.h5:/x b.h5:/y -o pipe.h5:/z | true"
    subprocess.run(command, shell=True, cwd=folder, env=outside_job(), timeout=60, check=True)
    assert read(folder / "pipe.h5", "z").shape == (61, 29)


def test_without_an_mpi_library_it_says_so(folder: Path) -> None:
    """One rank of a job speaks, and what needs no MPI is done all the same."""
    missing = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    for ranks in (0, 2):
        assert "no usable MPI library" in one_line(pdgemm(ranks, "info", cwd=folder, **missing))
    run = pdgemm(2, "plan", "--shape", "9,9,9", "--ranks", "2", cwd=folder, **missing)
    assert (run.returncode, run.stdout.count("machine: default")) == (0, 1)


def test_all_ranks_have_the_exit_code_of_the_one_that_works(folder: Path) -> None:
    """Of a command without MPI; here it is that of too little memory."""
    plan = f"{sys.executable} -m pdgemm plan --shape 9999,9999,9999 --ranks 4 --memory 1kB; echo code $?"
    run = jobs.run([str(jobs.MPIEXEC), "-n", "3", "sh", "-c", plan], cwd=folder)
    assert run.stdout.count("code 1") == 3
    assert run.stdout.count("per rank is too small") == 1


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])  # to a rank, and to the launcher
def test_a_product_that_is_ended_harms_no_file(tmp_path: Path, number: int) -> None:
    for name, matrix in (("a.h5", np.ones((2000, 2000))), ("c.h5", np.eye(3))):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = matrix
    old = (tmp_path / "c.h5").read_bytes()
    # narrow panels make the product last: there is time to end it in its middle
    words = ["multiply", "a.h5:/x", "a.h5:/x", "-o", "c.h5:/x", "--panel-width", "1", "--algorithm", "summa", "--force"]
    with started(tmp_path, jobs.python(2, "-m", "pdgemm", *words), **TEXTS) as job:
        assert job.stdout.readline().split()[0] == "read"  # now it multiplies
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


def ranks_in(folder: Path) -> list[int]:
    return running(lambda words, where: where == folder and words[1:3] == ["-m", "pdgemm"])


# ------------------------------------------------------------------ calibrate
def test_calibrate_writes_what_plans_and_products_read(folder: Path) -> None:
    for _ in range(3):
        run = pdgemm(2, "calibrate", "-o", "machine.json", cwd=folder)
        if "measure again when the machine is idle" not in run.stderr:  # as where tests beside it take its cores
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
    assert "no algorithm sends less than 46.9 M words per rank, in fewer than 4 rounds" in run.stdout
    assert max(map(len, lines)) <= 80
    facts = json.loads(pdgemm(1, *words, "--words", "640", "--json", cwd=folder).stdout)
    assert [x["words"] for x in facts["algorithms"] if x["algorithm"] == "ring"] == [2 * 640 * 15 // 16]
    for more, message in (
        ([*words], "takes --words"),
        ([*words, "--words", "9", "--layouts", "ideal"], "none of the options of a product, such as --layouts"),
        ([*words, "--words", "1.5"], "'1.5' is not of the form 25e6"),
        (["plan", "--ranks", "2"], "Missing option '--shape'"),
    ):
        run = pdgemm(1, *more, cwd=folder)
        assert message in one_line(run) and run.stdout == ""


# ------------------------------------------------------------------ ranks that were not told the same
@pytest.mark.parametrize("other", ["--help", "info --json"])  # without MPI, and with it
def test_command_lines_that_differ_are_refused(folder: Path, other: str) -> None:
    words = ["-m", "pdgemm", *other.split()]
    run = jobs.run([*jobs.python(2, "-m", "pdgemm", "info"), ":", *jobs.python(1, *words)[1:]], cwd=folder)
    assert f"called with different arguments: ranks 0-1: pdgemm info; rank 2: pdgemm {other}" in one_line(run)
    assert run.stdout == ""


@pytest.mark.parametrize("module", ["mpi4py.MPI", "pdgemm.support.signals"])
def test_sigint_while_mpi_loads_ends_the_job(folder: Path, module: str) -> None:
    """One rank is interrupted when it is about to import a module: before MPI starts, and after."""
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


def test_a_job_that_is_asked_to_end_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """On other ranks, with less memory; --checkpoint without parts is a product in memory."""
    for seed, name in enumerate(("a.h5", "b.h5")):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.random.default_rng(seed).standard_normal((1500, 1500))
    words = ["multiply", "a.h5:/x", "b.h5:/x", "-o", "c.h5:/group/c", "--checkpoint", "1h", "--memory", "6MB"]
    with started(tmp_path, jobs.python(2, "-m", "pdgemm", *words), **TEXTS) as job:
        assert "tiles of C" in job.stdout.readline()
        time.sleep(0.3)  # the first step has begun
        job.send_signal(signal.SIGUSR1)  # the launcher hands it on
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
    for bad, said in (
        (["--mtbf", "44h"], "--mtbf needs --checkpoint"),
        (["--checkpoint", "soon"], "'soon' is not of the form 10min, 90s, 2h or 3d"),
        (["--checkpoint", "1min", "--block", "8"], "--checkpoint does not go with --block"),
    ):
        assert said in one_line(pdgemm(1, *words[:5], *bad, cwd=tmp_path))


def test_a_flipped_bit_ends_the_job_or_is_repaired(folder: Path, tmp_path: Path) -> None:
    """--protect, by a planted flip in the sums; with parts the same command goes on."""
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
    rows = r"\d+ of \d+ rows of C differ from what was expected, row \d+ first"
    flipped = r"the repetition has other bits: one has flipped on rank 1 on \S+; C is that of the repetition"
    suspected = rf"{rows}, by more than rounding errors; if a bit has flipped, it was on rank 1 on \S+"
    shown = rf"^pdgemm: {rows}; the product is repeated\npdgemm: {flipped}$"
    for times, options, code, said in (
        (1, ["repair"], 0, shown),
        (1, ["detect"], 1, rf"^pdgemm: error: {suspected}; protect='repair' would have repeated the product$"),
        (99, ["repair"], 1, rf"^pdgemm: error: {rows}, .* twice in the same way: .* rank 1 on \S+: take that node out"),
        (1, ["repair", "--checkpoint", "1h", "--verify"], 0, shown),
    ):
        (tmp_path / "c.h5").unlink(missing_ok=True)
        plant = jobs.with_plant(tmp_path, source.replace("TIMES", str(times)))
        run = pdgemm(2, *words, *options, cwd=tmp_path, **plant)
        assert run.returncode == code and re.search(said, run.stderr, re.MULTILINE), run.stderr
        assert (tmp_path / "c.h5").exists() == (code == 0)
