"""`pdgemm solve`, `svd`, `eigh` and others as users type them: files to files, checked, on any number of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import jobs
import numpy as np
import pytest
from jobs import pdgemm
from many_commands import one_line, read, several

pytestmark = jobs.needs_mpiexec
EPS = np.finfo(float).eps


def right(*runs: jobs.Finished) -> None:
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stdout + run.stderr for run in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("linalg")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((60, 60))
    with h5py.File(made / "a.h5", "w") as file:
        file["general"], file["positive"] = x, x @ x.T + np.eye(60)
        file["upper"], file["lower"] = np.triu(file["positive"][()]), np.tril(file["positive"][()])
        file["symmetric"] = x + x.T
        file["singular"], file["tall"] = np.ones((60, 60)), rng.standard_normal((90, 20))
        file["hilbert"], file["ones"] = 1 / (1 + np.add.outer(np.arange(12), np.arange(12))), np.ones((12, 1))
        file["b"], file["integers"] = rng.standard_normal((60, 5)), np.ones((60, 60), "i4")
        file["vector"] = rng.standard_normal(60)
        file["few"] = rng.standard_normal((90, 4)) @ rng.standard_normal((4, 70))
        y = rng.standard_normal((60, 60)) + 1j * x
        file["hermitian"], file["right"] = y + y.conj().T, rng.standard_normal((90, 3))
        file["line"] = rng.standard_normal(90)
    return made


@pytest.mark.parametrize(
    ("ranks", "name", "options"),
    [
        (1, "general", ["--precision", "single"]),
        (2, "positive", ["--assume", "pos", "--block", "8", "--trace", "trace.json", "--json"]),
        (1, "upper", ["--assume", "upper triangular", "--block", "7x5"]),
        (1, "lower", ["--assume", "lower triangular"]),
    ],
)
def test_solve(folder: Path, ranks: int, name: str, options: list[str]) -> None:
    output = f"{name}.h5"
    done = pdgemm(ranks, "solve", f"a.h5:/{name}", "a.h5:/b", "-o", f"{output}:/x", "--verify", *options, cwd=folder)
    right(done)
    A, b, x = read(folder / "a.h5", name), read(folder / "a.h5", "b"), read(folder / output, "x")
    assert abs(b - A @ x).max() <= 60 * 60 * EPS * (abs(A) @ abs(x)).max()
    if "--json" not in options:
        assert "backward error" in done.stdout and "ok" in done.stdout
        return
    facts = json.loads(done.stdout)
    assert facts["verify"]["passed"] and facts["verify"]["value"] <= facts["verify"]["bound"]
    assert facts["solve"]["as_predicted"] and facts["ranks"] == ranks
    exact = 1 / np.linalg.cond(A, 1)
    assert 0.99 * exact <= facts["rcond"] <= 3 * exact and "warnings" not in facts


def test_matrices_from_npy_files(folder: Path) -> None:
    """In C and Fortran order, big-endian, and vectors; read whole, in panels and in parts."""
    A, h, line = (read(folder / "a.h5", name) for name in ("tall", "hermitian", "line"))
    z = A + 1j * A[::-1]
    for name, array in {"f": np.asfortranarray(A), "z": np.asfortranarray(z).astype(">c16"), "h": h, "v": line}.items():
        np.save(folder / f"{name}.npy", array)
    parts, checked = ["--memory", "8MiB"], ["--verify", "-o"]
    svd, product = ["svd", "z.npy", "-k", "20"], ["multiply", "z.npy", "f.npy", "--transa", "T"]
    gram = ["multiply", "h.npy", "h.npy", "--transa", "C", "--beta", "2", "--c", "h.npy"]
    commands = [
        [*svd, *checked, "npy.h5:/0"],
        [*svd, *parts, *checked, "npy.h5:/1"],
        ["lstsq", "f.npy", "v.npy", *checked, "npy.h5:/2"],
        [*product, *checked, "npy.h5:/3"],
        [*product, *parts, *checked, "npy.h5:/4"],
        [*gram, *checked, "npy.h5:/5"],
    ]
    right(*several(2, commands, folder))
    for of in ("0", "1"):
        U, s, Vh = (read(folder / "npy.h5", f"{of}/{name}") for name in ("U", "s", "Vh"))
        assert np.allclose((U * s) @ Vh, z)
    for of, expected in (
        ("2", np.linalg.lstsq(A, line)[0]), ("3", z.T @ A), ("4", z.T @ A), ("5", h.conj().T @ h + 2 * h),
    ):  # fmt: skip
        assert np.allclose(read(folder / "npy.h5", of), expected)
    output = ["-o", "npy.h5:/x"]
    for words, message in (
        (["multiply", "z.npy", "z.npy", "--transa", "C", *output], "a matrix in a file has no conjugate view"),
        (["multiply", "f.npy", "h.npy", "--c", "f.npy", "--beta", "1", *parts, *output], "must be in C order"),
        (["rank", "nothing.npy"], "nothing.npy"),
        (["rank", "a.h5"], "'a.h5' is not of the form FILE:/DATASET or FILE.npy"),
    ):
        assert message in one_line(pdgemm(1, *words, cwd=folder))


def test_vectors_stay_vectors_and_results_are_compressed(folder: Path) -> None:
    """If the right operand is a dataset of one dimension, the result is one, too."""
    A, b = read(folder / "a.h5", "general"), read(folder / "a.h5", "vector")
    both = "a.h5:/general", "a.h5:/vector"
    right(pdgemm(1, "solve", *both, "-o", "v.h5:/x", "--verify", "--compression", "gzip", cwd=folder))
    with h5py.File(folder / "v.h5") as file:
        assert file["x"].shape == (60,) and file["x"].compression == "gzip"
        assert np.allclose(A @ file["x"][()], b)
    for options in ([], ["--memory", "8MiB", "--checkpoint", "1h"]):
        right(pdgemm(1, "multiply", *both, "-o", "v.h5:/y", "--verify", *options, cwd=folder))
        y = read(folder / "v.h5", "y")
        assert y.shape == (60,) and np.allclose(y, A @ b)


def test_ill_conditioned_matrices_are_warned_of_once(folder: Path) -> None:
    done = pdgemm(1, "solve", "a.h5:/hilbert", "a.h5:/ones", "-o", "h.h5:/x", cwd=folder)
    assert done.returncode == 0 and done.stderr.count("pdgemm: warning: A (12 x 12 on a ") == 1
    # the digits of rcond are rounding errors, and depend on the order of sums
    rcond = r"rcond \d\.\de-17, an estimate of 1 / \(\|A\|_1 \|A\^-1\|_1\) for the scaled A"
    assert re.search(rcond, done.stdout), done.stdout
    script = folder / "hilbert.py"
    script.write_text(
        "import numpy as np, scipy.linalg, warnings\n"
        "from pdgemm import DistMatrix, ProcessGrid, linalg\n"
        "A = DistMatrix.from_global(scipy.linalg.hilbert(12), grid=ProcessGrid())\n"
        "linalg.inv(A)\n"
        "with warnings.catch_warnings(record=True) as kept:\n"
        "    linalg.solve(A, np.ones(12))\n"
        "assert len(kept) == 1\n"
    )
    done = jobs.run(jobs.python(2, "-m", "pdgemm", str(script)), cwd=folder)
    assert done.returncode == 0 and done.stderr.count("LinAlgWarning") == 1, done.stderr
    assert "hilbert.py:4: LinAlgWarning: A (12 x 12" in done.stderr


def test_svd(folder: Path) -> None:
    done = pdgemm(2, "svd", "a.h5:/few", "-k", "4", "-o", "s.h5:/pca", "--verify", cwd=folder)
    right(done)
    U, s, Vh = (read(folder / "s.h5", f"pca/{name}") for name in ("U", "s", "Vh"))
    A = read(folder / "a.h5", "few")
    assert U.shape == (90, 4) and s.shape == (4,) and Vh.shape == (4, 70)
    assert np.allclose(s, np.linalg.svd(A, compute_uv=False)[:4])
    assert np.allclose((U * s) @ Vh, A)
    printed = done.stdout.split("\ns = ")[1].splitlines()
    assert np.allclose([float(x) for x in printed[0].split(",")], s, rtol=1e-9)
    assert f"s_1 of its true value; s_1 = {s[0]:.6g}" in printed[1]
    assert printed[2].startswith("rank 4 holds all but ") and printed[2].endswith(" of |A|_F^2")
    assert done.stdout.count(": ok") == 5


def test_inaccurate_singular_values_are_warned_of(folder: Path) -> None:
    """One warning for all ranks; the values and their error bound are in the JSON object."""
    words = ["svd", "a.h5:/tall", "-k", "2", "-o", "w.h5:/f", "--oversample", "1", "--steps", "2", "--json", "--verify"]
    done = pdgemm(2, *words, cwd=folder)
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr.count("pdgemm: warning: svd of 90 x 20: the 2 largest") == 1
    assert facts["warnings"][0].startswith("svd of 90 x 20")
    assert not facts["verify"]["passed"] and not facts["verify"]["wrong"]  # inconclusive: the bound is s_1 / 10 or more
    exact = np.linalg.svd(read(folder / "a.h5", "tall"), compute_uv=False)
    known = facts["svd"]["facts"]
    assert 1e-12 < abs(facts["singular_values"] - exact[:2]).max() <= known["bound"] * exact[0]
    assert np.isclose(known["share"], (np.array(facts["singular_values"]) ** 2).sum() / (exact**2).sum())


def test_svd_of_a_file(folder: Path) -> None:
    """With --memory, A is reduced to triangles, or read in every step if triangles do not fit.

    The printed values and checks equal those of `svd` in memory; the number of bytes read is checked.
    """
    A, plain = read(folder / "a.h5", "tall"), ["svd", "a.h5:/tall", "-k", "1", "-o", "m.h5:/f", "--verify"]
    exact, whole = np.linalg.svd(A, compute_uv=False)[:1], pdgemm(1, *plain, cwd=folder)
    refused = one_line(pdgemm(1, *plain, "--force", "--memory", "1KiB", cwd=folder))
    least = re.search(r"\((\d+) bytes\) are needed", refused)
    assert least
    words = [[*plain, "--force", "--memory", memory] for memory in ("4MiB", least[1])]
    triangles, steps, *facts = several(2, [*words, *([*x, "--json"] for x in words)], folder)
    right(whole, triangles, steps, *facts)
    assert "become triangles of order 20" in triangles.stdout and "read twice in each step" in steps.stdout
    for done, run in zip((triangles, steps), facts):
        assert done.stdout.count(": ok") == whole.stdout.count(": ok") == 5
        lines = [
            [x for x in text.splitlines() if x.startswith(("s = ", "each", "rank"))]
            for text in (whole.stdout, done.stdout)
        ]
        for mine, other in zip(*lines, strict=True):
            numbers = [[float(x) for x in re.findall(r"\d\.\d+(?!e)", line)] for line in (mine, other)]
            assert re.sub(r"[\d.e-]+", "", mine) == re.sub(r"[\d.e-]+", "", other) and np.allclose(*numbers, rtol=1e-4)
        known = json.loads(run.stdout)
        passes = 2 if done is triangles else 2 * known["svd"]["steps"] + 3
        assert known["svd"]["bytes_read"] == passes * A.nbytes
        assert np.allclose(known["singular_values"], exact, rtol=1e-12)


def test_all_written_datasets_are_printed(folder: Path) -> None:
    """For svd and eigh; `eigh --values` writes only one dataset."""
    for words, names in (
        (["svd", "a.h5:/tall"], ["/f/Vh", "/f/s", "/f/U"]),
        (["eigh", "a.h5:/hermitian"], ["/f/V", "/f/w"]),
        (["eigh", "a.h5:/hermitian", "--values"], ["/f/w"]),
    ):
        done = pdgemm(1, *words, "-o", f"{words[0]}{len(names)}.h5:/f", "--json", cwd=folder)
        assert [x["name"] for x in json.loads(done.stdout)["wrote"]] == names, done.stderr
    assert np.allclose(read(folder / "svd3.h5", "f/s"), np.linalg.svd(read(folder / "a.h5", "tall"), compute_uv=False))


def test_gram(folder: Path) -> None:
    right(pdgemm(2, "gram", "a.h5:/tall", "-o", "g.h5:/g", "--verify", cwd=folder))
    A = read(folder / "a.h5", "tall")
    assert np.allclose(read(folder / "g.h5", "g"), A.T @ A)


@pytest.mark.parametrize(
    ("ranks", "name", "part", "options"),
    [
        (1, "hermitian", slice(60), []),
        (1, "upper", slice(60), ["--upper", "--block", "8"]),
        (2, "symmetric", slice(2, 30), ["--subset", "2:29", "--grid", "1x2", "--dtype", "complex128"]),
    ],
)
def test_eigh(folder: Path, ranks: int, name: str, part: slice, options: list[str]) -> None:
    """One triangle is read, w and V are written, and the values are printed."""
    a, output = read(folder / "a.h5", name), f"e-{name}.h5"
    half = np.triu(a, 1).T if "--upper" in options else np.tril(a, -1)
    A = half + half.conj().T + np.diag(a.diagonal())
    done = pdgemm(ranks, "eigh", f"a.h5:/{name}", "-o", f"{output}:/e", "--verify", *options, cwd=folder)
    right(done)
    w, V, bound = read(folder / output, "e/w"), read(folder / output, "e/V"), 60 * 60 * EPS * abs(A).max()
    assert abs(w - np.linalg.eigvalsh(A)[part]).max() <= bound and abs(A @ V - V * w).max() <= bound
    assert V.shape == (60, len(w)) and V.dtype == ("c16" if ranks == 2 else a.dtype)
    printed = done.stdout.split("\nw = ")[1].splitlines()[0].replace("..., ", "").split(", ")
    assert np.allclose([float(x) for x in printed], [*w[:19], w[-1]], rtol=1e-9)
    assert done.stdout.count(": ok") == (5 if len(w) == 60 else 3)
    if ranks == 1:
        alone = pdgemm(1, "eigh", f"a.h5:/{name}", "--values", "-o", f"{output}:/only", *options, cwd=folder)
        with h5py.File(folder / output) as file:
            assert alone.returncode == 0 and list(file["only"]) == ["w"] and abs(file["only/w"] - w).max() <= bound
        mixed = pdgemm(1, "eigh", f"a.h5:/{name}", "--values", "-o", f"{output}:/e", cwd=folder)
        assert "V has earlier eigenvectors" in one_line(mixed)


def test_eigenvalues_without_vectors_are_checked_and_need_no_file(folder: Path) -> None:
    """Checked by the trace and the norm; the JSON object contains all values."""
    before = sorted(folder.iterdir())
    done = pdgemm(1, "eigh", "a.h5:/hermitian", "--values", "--verify", "--json", cwd=folder)
    facts, exact = json.loads(done.stdout), np.linalg.eigvalsh(read(folder / "a.h5", "hermitian"))
    assert np.allclose(facts["eigenvalues"], exact) and facts["verify"]["passed"]
    assert [x["what"] for x in facts["verify"]["checks"]][1:] == ["|sum of w - trace of A|", "|sum of w^2 - |A|_F^2|"]
    assert sorted(folder.iterdir()) == before


def test_rank(folder: Path) -> None:
    """The values on both sides of the tolerance are printed."""
    done = pdgemm(2, "rank", "a.h5:/few", cwd=folder)
    s = np.linalg.svd(read(folder / "a.h5", "few"), compute_uv=False)
    assert "rank 4 (singular values above 2e-14 s_1) of 90 x 70\n" in done.stdout, done.stderr
    assert f"\ns_1 = {s[0]:.6g}, s_4 = {s[3]:.6g}, s_5 = " in done.stdout
    done = pdgemm(1, "rank", "a.h5:/few", "--rtol", f"{(s[1] + s[2]) / 2 / s[0]}", "--json", cwd=folder)
    assert json.loads(done.stdout)["rank"] == 2


@pytest.mark.parametrize(("ranks", "name", "b"), [(1, "tall", "right"), (2, "few", "right"), (1, "tall", "line")])
def test_lstsq(folder: Path, ranks: int, name: str, b: str) -> None:
    words = "lstsq", f"a.h5:/{name}", f"a.h5:/{b}", "-o", f"l-{name}-{b}.h5:/x"
    done = pdgemm(ranks, *words, "--verify", cwd=folder)
    right(done)
    A, B, x = read(folder / "a.h5", name), read(folder / "a.h5", b), read(folder / f"l-{name}-{b}.h5", "x")
    exact, _, rank, s = np.linalg.lstsq(A, B)
    assert x.shape == exact.shape and np.allclose(x, exact)
    assert f"\nrank {rank} of {len(A)} x {A.shape[1]}\ns_1 = {s[0]:.6g}, s_{len(s)} = " in done.stdout
    assert f"\n|B - A X|_F = {np.linalg.norm(B - A @ x):.6g}, |B|_F = {np.linalg.norm(B):.6g}\n" in done.stdout
    assert done.stdout.count(": ok") == 1 + (rank < A.shape[1])


BAD = {
    "solve a.h5:/singular a.h5:/b": "singular",
    "solve a.h5:/general a.h5:/b --assume pos": "is not positive definite",
    "solve a.h5:/integers a.h5:/b": "--dtype float64",
    "svd a.h5:/few -k 71": "-k 71 is more than the 70 singular values",
    "svd a.h5:/few -k 4 --passes 1": "--passes needs --memory",
    "svd a.h5:/few --memory 4MiB": "--memory needs -k",
    "svd a.h5:/few -k 4 --memory 4MiB --block 3": "cannot be combined with --block",
    "svd a.h5:/few -k 4 --memory 1kiB": "bytes) are needed",
    "gram a.h5:/b -o a.h5:/general": "it is replaced only with --force",
}


def test_bad_input_is_one_line_and_nothing_is_written(folder: Path) -> None:
    before = (folder / "a.h5").read_bytes()
    commands = [[*line.split(), *([] if " -o " in line else ["-o", "n.h5:/x"])] for line in BAD]
    for run, message in zip(several(2, commands, folder), BAD.values()):
        assert message in one_line(run)
    assert not (folder / "n.h5").exists() and (folder / "a.h5").read_bytes() == before
