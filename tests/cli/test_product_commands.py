"""`pdgemm multiply` and `verify` as users type them: right results, from files to files, in memory and in parts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import h5py
import jobs
import numpy as np
import pytest
from jobs import pdgemm
from many_commands import one_line, read, several
from problems import TOLERANCE, gemm_error

pytestmark = jobs.needs_mpiexec
AB = "a.h5:/x", "b.h5:/y"


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
    assert run.stdout.count("wrote") == 1  # only one rank prints
    assert gemm_error(read(folder / f"c{ranks}.h5", "z"), 1, *operands(folder)) <= TOLERANCE


def test_types_of_operands_and_of_sums(folder: Path) -> None:
    """--compute-type rounds operands of float64, and --verify allows for it.  Operands of int8 and float16; --dtype."""
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
    assert "redistributed" not in inner.stdout  # B is a view of A, and the layout of both suits "inner"
    assert ", float16, added up in float64, by " in mixed.stdout  # C is stored as float16
    for name, dtype, value in (("i32", "int32", 300), ("d", "float16", 40)):
        c = read(folder / f"{name}.h5", "m")
        assert c.dtype == dtype and (c == value).all()
    c = read(folder / "i.h5", "z")
    assert c.dtype == "float32"
    assert gemm_error(c, 1, operands(folder)[0].astype("f"), np.ones((83, 3), "f")) <= TOLERANCE


def test_generate_multiply_and_verify(tmp_path: Path) -> None:
    """`generate`, `multiply` with all options, and `verify`, with their output in JSON."""
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
    """Also under two names, and for all pairs of ops.  The product may use another grid than the matrices."""
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
    *products, checked, other, free, layered, refused = several(
        4,
        [
            *(["multiply", *twice, "-o", f"o{a}{b}.h5:/z", "--transa", a, "--transb", b] for a, b in both),
            ["verify", "once.h5:/x", "once.h5:/x", "oNT.h5:/z", "--transb", "T", "--json"],
            ["multiply", "once.h5:/x", "once.h5:/other", "-o", "t.h5:/z", "--json"],
            [*gram, *summa],
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
    assert [len(json.loads(x.stdout)["read"]) for x in (checked, other, free)] == [2, 2, 1]
    product = json.loads(layered.stdout)["product"]
    assert (product["algorithm"], product["grid"], product["layers"]) == ("2.5d", [1, 2], 2)
    assert product["as_predicted"] and product["predicted_seconds"] > 0 < product["lower_bound_words"]
    assert "one side of its grid divides the other" in one_line(refused)


def test_results_that_replace_a_dataset(folder: Path) -> None:
    """A result replaces data written by pdgemm, and C on entry; other data only with --force."""
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
        ([*product, "own.h5:/x", "--beta", "3"], 2),  # refused: x is C on entry, but also A
        (["multiply", "own.h5:/all_of_new", "own.h5:/x", "-o", "own.h5:/new"], 2),  # refused: A is a view of /new
        ([*product, "own.h5:/x", "--alpha", "7", "--force"], 0),
        (["generate", "own.h5:/c", "--shape", "2x2", "--kind", "ones"], 0),
        (["generate", "own.h5:/kept", "--shape", "2x2", "--kind", "ones", "--force"], 0),
    ]
    done = several(2, [words for words, _ in commands], folder)
    assert [x.returncode for x in done] == [code for _, code in commands], done
    ones, eye = np.ones((2, 2)), np.eye(5)
    for name, expected in (("new", 2 * eye), ("c", ones), ("e", -2 * eye), ("x", 7 * eye), ("kept", ones)):
        assert np.array_equal(read(folder / "own.h5", name), expected), name


def test_matrices_twenty_times_as_large_as_the_memory(tmp_path: Path) -> None:
    """A rank uses at most its limit and 16 MiB for libraries; it reads and writes as many bytes as planned."""
    (m, k), limit, most = (4300, 300), 4 << 20, 16 << 20
    for name, shape in (("small.h5", (64, 64)), ("x.h5", (m, k))):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.random.default_rng(k).standard_normal(shape)
    peaks = []
    for file, out in (("small.h5", "d.h5"), ("x.h5", "c.h5")):
        words = ["multiply", f"{file}:/x", f"{file}:/x", "--transb", "T", "-o", f"{out}:/c", "--memory", "4MiB"]
        run = pdgemm(2, *words, "--json", cwd=tmp_path, PDGEMM_NODE_MEMORY="0")  # shared memory counts in each rank
        assert run.returncode == 0, run.stderr
        product = json.loads(run.stdout)["product"]
        peaks.append(product["peak"])
        assert all(product[x] == product["plan"][x] for x in ("bytes_read", "bytes_written"))
    assert 8 * (2 * m * k + m * m) >= 2 * 20 * limit
    assert product["plan"]["bytes_per_rank"] <= limit and peaks[1] - peaks[0] <= limit + most
    A, rows = read(tmp_path / "x.h5", "x"), [0, m // 3, m - 1]
    assert gemm_error(read(tmp_path / "c.h5", "c")[rows], 1, A[rows], A.T) <= TOLERANCE


@pytest.mark.parametrize("way", [[], ["--memory", "3MB", "--trace", "t.json"]])
def test_a_page_of_a_product(folder: Path, tmp_path: Path, way: list[str]) -> None:
    """The page shows the printed text, a timeline and the times of each rank; no other files remain.

    Its heading names the file, and the operands as multiplied; it does not mention training.
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
    assert ("lets that rank read" in page) == (way == [])  # words from rank to rank: only of a product in memory
    assert sorted(x.name for x in tmp_path.iterdir()) == ["c.h5", "r.html", *["t.json"] * bool(way)]
    for name, said in (("r.pdf", "a file with the ending .html"), ("none/r.html", "the folder")):
        bad = pdgemm(1, *words[:6], name, "-o", "d.h5:/c", cwd=tmp_path)
        assert said in one_line(bad) and not (tmp_path / "d.h5").exists()


def test_in_parts_and_verified(folder: Path, tmp_path: Path) -> None:
    """The plan is printed first; C on entry may be the output."""
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
    bad = pdgemm(2, *words, "--memory-limit", "10", "--mover", "ring", cwd=tmp_path)
    assert "memory limit 10 bytes per rank is too small" in one_line(bad)


def test_the_plan_of_a_product_in_parts(tmp_path: Path) -> None:
    """If no plan in memory fits, `plan` prints one in parts, as text or JSON, and exits with 1."""
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
