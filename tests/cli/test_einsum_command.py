"""`pdgemm einsum` as users type it: tensors from files to files, planned, checked, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import jobs
import numpy as np
import pytest
from many_commands import one_line, read, several

pytestmark = jobs.needs_mpiexec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("einsum")
    rng = np.random.default_rng(5)
    with h5py.File(made / "v.h5", "w") as file:
        for name, shape in {
            "t2": (4, 5, 6, 7),
            "w": (6, 7, 3, 5),
            "x": (5, 3, 8),
            "v": (7,),
            "square": (4, 4, 6),
        }.items():
            file[name] = rng.standard_normal(shape)
        file["complex"], file["flags"] = rng.random((5, 3, 2)) + 1j, np.ones((2, 3, 4), bool)
        file["single"], file["none"] = rng.random((6, 7, 2)).astype("f4"), np.zeros((6, 0, 2))
        file["foreign"], file["number"] = np.ones((2, 2)), 1.0
    np.save(made / "f.npy", np.asfortranarray(rng.random((6, 7, 2))))
    return made


def tensors(folder: Path, *names: str) -> list[np.ndarray]:
    return [np.load(folder / x) if x.endswith("npy") else read(folder / "v.h5", x) for x in names]


@pytest.mark.parametrize("ranks", [1, 4])
def test_contractions(folder: Path, ranks: int) -> None:
    """Of two and of three operands, batched, repeated, broadcast, reduced, of several types; C, s, and numbers."""
    cases: list[tuple[str, list[str], list[str]]] = [
        ("ijab,abkl->ijkl", ["t2", "w"], ["--alpha", "-2.5"]),
        ("ijab,abkl,lkm->mij", ["t2", "w", "x"], ["--memory", "30kB"]),
        ("ijab,ijab->ij", ["t2", "t2"], []),
        ("...ab,abk", ["t2", "f.npy"], ["--compression", "gzip"]),
        ("iik->ki", ["square"], []),
        ("ijab,abk->kij", ["t2", "single"], ["--dtype", "float32"]),
        ("jkx,jkm->mx", ["complex", "x"], ["--alpha", "1+2j"]),
        ("ajb,ajc->bc", ["none", "none"], []),
        ("abk,b->a", ["f.npy", "v"], []),
    ]
    files = [[x if x.endswith("npy") else f"v.h5:/{x}" for x in names] for _, names, _ in cases]
    commands = [
        ["einsum", text, *paths, "-o", f"r{ranks}.h5:/{at}", "--verify", *options]
        for at, ((text, _, options), paths) in enumerate(zip(cases, files))
    ]
    energy = ["einsum", "ijab,ijab->", "v.h5:/t2", "v.h5:/t2", "--json", "--verify"]
    one = ["einsum", "ijab,abkl->ijkl", "v.h5:/t2", "v.h5:/w", "-o", f"j{ranks}.h5:/r", "--json", "--verify"]
    *runs, number, product = several(ranks, [*commands, energy, one], folder)
    for at, ((text, names, options), run) in enumerate(zip(cases, runs)):
        assert run.returncode == 0 and run.stdout.count("wrote") == 1, run.stdout + run.stderr
        assert ": ok" in run.stdout or "none" in names
        arrays = tensors(folder, *names)
        alpha = complex(options[1]) if "--alpha" in options else 1
        expected = alpha * np.einsum(text, *(x.astype("f4") if "--dtype" in options else x for x in arrays))
        result = read(folder / f"r{ranks}.h5", str(at))
        assert result.shape == expected.shape
        assert np.allclose(result, expected, rtol=1e-4 if "--dtype" in options else 1e-12, atol=1e-5), text
        if result.ndim > 1:
            assert "as planned; bound " in run.stdout
    (t2,) = tensors(folder, "t2")
    facts = json.loads(number.stdout)
    assert np.isclose(facts["value"], (t2**2).sum()) and facts["verify"]["passed"] and "wrote" not in facts
    facts = json.loads(product.stdout)
    assert facts["words"]["counted"] == facts["words"]["planned"] == facts["plan"]["words"] >= facts["words"]["bound"]
    assert facts["wrote"]["shape"] == [4, 5, 3, 5] and facts["verify"]["passed"]
    assert [x["name"] for x in facts["read"]] == ["/t2", "/w"]


def test_bad_input(folder: Path) -> None:
    """One sentence, exit code 2, and nothing written."""
    product, files = "ijab,abkl->ijkl", ["v.h5:/t2", "v.h5:/w"]
    before = (folder / "v.h5").read_bytes()
    cases: list[tuple[list[str], str]] = [
        ([product, *files], "has the shape (4, 5, 3, 5): name it by -o"),
        (["ijab,ijab->", files[0], files[0], "-o", "new.h5:/r"], "is a number, and no dataset: leave out -o"),
        (["ijab,bakl->ijkl", *files, "-o", "new.h5:/r"], "index 'b' has the extents 7 and 6"),
        (["ijab,abk->ijk", *files, "-o", "new.h5:/r"], "'abk' names 3 axes of an operand of (6, 7, 3, 5)"),
        (["ijab->ijz", files[0], "-o", "new.h5:/r"], "einsum 'ijab->ijz' of shapes [(4, 5, 6, 7)]"),
        ([product, files[0], "-o", "new.h5:/r"], "einsum 'ijab,abkl->ijkl' of shapes [(4, 5, 6, 7)]"),
        ([product, files[0], "v.h5:/none-such", "-o", "new.h5:/r"], "has no dataset /none-such"),
        ([product, files[0], "v.h5:/number", "-o", "new.h5:/r"], "its shape is ()"),
        (["abc->cab", "v.h5:/flags", "-o", "new.h5:/r"], "holds bool"),
        ([product, *files, "-o", "v.h5:/foreign"], "replaced only with --force"),
        ([product, *files, "-o", "v.h5:/w", "--memory", "1GiB"], "is operand 2"),
        (
            [product, *files, "-o", "new.h5:/r", "--memory", "2kB"],
            "--memory 2.0 KiB per rank is too little: the",
        ),
        ([product, *files, "-o", "new.h5:/r", "--alpha", "2j"], "alpha"),
        ([product, *files, "-o", "new.h5:/r", "--trace", "v.h5"], "--trace v.h5 is a file that is read"),
        ([product, "-o", "new.h5:/r"], "Missing argument"),
    ]
    runs = several(2, [["einsum", *words] for words, _ in cases], folder)
    for (words, expected), run in zip(cases, runs):
        line = one_line(run)
        assert expected in line, (words, line)
    assert not (folder / "new.h5").exists() and (folder / "v.h5").read_bytes() == before
