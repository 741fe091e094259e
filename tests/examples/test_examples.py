"""The programs of docs/examples, on these ranks: their results against NumPy, SciPy and scikit-learn.

An example prints the output that the gallery shows; numbers that are rounding errors may be 100 times as large.
Functions of examples are also called with matrices on every grid.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.linalg
from example_programs import EXAMPLES, example
from problems import grid_shapes

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5, npy
from pdgemm.linalg import lstsq

pytestmark = pytest.mark.mpi


@pytest.fixture
def ran(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Path]:
    """A function that runs an example in a temporary folder, and compares its output with the gallery."""

    def run(name: str) -> Path:
        capsys.readouterr()
        example(name).main(str(shared_tmp_path))
        comm.Barrier()
        printed = capsys.readouterr().out
        if comm.rank:
            assert printed == ""
        else:
            shown = shown_of(name)
            assert wording(printed) == wording(shown)
            assert all(x <= 100 * y for x, y in zip(roundings(printed), roundings(shown), strict=True)), printed
        assert (shared_tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        return shared_tmp_path

    return run


def shown_of(name: str) -> str:
    """Return the output of an example that the gallery shows."""
    found = re.search(rf"\$ .*examples/{name}\.py\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    assert found
    return found[1]


def wording(text: str) -> str:
    """Return a text without rounding errors, and without parts that differ between versions of Python."""
    return re.sub(r"\d+e[+-]\d+|\d+ (?=steps|modules)|(?<=the first five: ).*", "#", text)


def roundings(text: str) -> list[float]:
    """Return the rounding errors in a text: integers with an exponent, such as 3e-15."""
    return [float(x) for x in re.findall(r"\d+e[+-]\d+", text)]


def matrices(comm: Any, whole: np.ndarray) -> Iterator[Any]:
    """Yield a matrix on every grid of these ranks, in small blocks that do not divide it, or in one block per rank."""
    for shape, block in zip(grid_shapes(comm.size), itertools.cycle([(3, 2), None, (2, 5)])):
        with ProcessGrid(comm, shape) as grid:
            yield DistMatrix.from_global(whole, grid=grid, block=block)


def drawn(m: int, n: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((m, n))


def same_on_all(comm: Any, x: np.ndarray) -> bool:
    return all(np.array_equal(x, y) for y in comm.allgather(x))


def aligned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x, its columns multiplied by 1 or -1 to agree with those of y."""
    return x * np.sign((x * y).sum(axis=0))


# ---------------------------------------------------------------- one test for each example
def test_pca(ran: Callable[[str], Path]) -> None:
    folder = ran("pca")
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA

    with h5py.File(folder / "digits.h5") as digits, h5py.File(folder / "pca.h5") as made:
        X, scores = digits["X"][:], made["scores"][:]
    expected = PCA(10, svd_solver="full").fit_transform(X)
    assert np.array_equal(X, load_digits().data)
    assert scores.shape == (1797, 10) and np.allclose(aligned(scores, expected), expected, atol=0.02)  # up to 60


def test_pca_on_every_grid(comm: Any) -> None:
    x = drawn(53, 7) * 2.0 ** -np.arange(7) + 3  # variances that are well apart, and a mean
    U, s, Vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    for A in matrices(comm, x):
        variances, share, V, scores = example("pca").pca(A, 4)
        assert np.allclose(variances, s[:4] ** 2 / 52) and np.isclose(share, sum(s[:4] ** 2) / sum(s**2))
        assert np.allclose(aligned(V, Vt[:4].T), Vt[:4].T)
        assert np.allclose(aligned(scores.allgather(), U[:, :4]), (U * s)[:, :4])


def test_pca_file(ran: Callable[[str], Path]) -> None:
    """The example reads a file of more than twice its memory limit."""
    folder, module = ran("pca_file"), example("pca_file")
    X = np.load(folder / "patches.npy")
    assert X.nbytes > 2 * module.MEMORY


def test_pca_file_on_every_grid(comm: Any, shared_tmp_path: Path) -> None:
    x = drawn(203, 40) * 1.5 ** -np.arange(40) + 3  # variances that are well apart, and a mean of 3
    _, s, Vt = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            npy.save(shared_tmp_path / "x.npy", next(matrices(comm, x)))
            A = npy.dataset(shared_tmp_path / "x.npy", grid)
            variances, V, mean, report = example("pca_file").pca(A, 4, 1e-6, 1 << 24)
            assert np.allclose(variances, s[:4] ** 2 / 202) and np.allclose(mean, x.mean(axis=0))
            assert np.allclose(aligned(V.T, Vt[:4].T), Vt[:4].T)
            assert np.isclose(report.facts["share"], sum(s[:4] ** 2) / sum(s**2)) and report.facts["bound"] <= 1e-6


def test_nearest_neighbours(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program runs on one rank; it reads files that a product on all ranks wrote."""
    module = example("nearest_neighbours")
    from sklearn.datasets import load_digits

    X = DistMatrix.from_global(load_digits().data, grid=ProcessGrid(comm))
    hdf5.save(shared_tmp_path / "digits.h5", "/X", X)
    hdf5.save(shared_tmp_path / "similarity.h5", "/S", X @ X.T)
    if comm.rank == 0:
        module.main(shared_tmp_path)
        assert capsys.readouterr().out == shown_of("nearest_neighbours")  # only integers: equal texts
        assert (shared_tmp_path / "nearest_neighbours.png").stat().st_size > 0


@pytest.mark.parametrize(
    "name",
    ["randomized_svd", "newton_schulz", "pagerank", "gaussian_process", "least_squares", "vibrating_plate"],
)
def test_programs(ran: Callable[[str], Path], name: str) -> None:
    ran(name)


def test_inverse_and_polar_factor_on_every_grid(comm: Any) -> None:
    module, x = example("newton_schulz"), drawn(17, 17) + 6 * np.eye(17)
    tall = drawn(23, 9)
    for A in matrices(comm, x):
        X, norms = module.inverse(A)
        assert np.allclose(X.allgather(), np.linalg.inv(x)) and norms[-1] <= 1e-12 < norms[-2]
    for A in matrices(comm, tall):
        U, norms = module.polar(A)
        assert np.allclose(U.allgather(), scipy.linalg.polar(tall)[0]) and norms[-1] <= 1e-12 < norms[-2]


def test_links_of_modules() -> None:
    names, links = example("pagerank").links_of_modules()
    assert links.diagonal().sum() == 0
    assert links[names.index("types"), names.index("enum")] == 1  # because of "from types import MappingProxyType"
    assert links[names.index("enum"), names.index("types")] == 0


def test_pagerank_on_every_grid(comm: Any) -> None:
    """Compared with NumPy's eigenvector of the whole matrix; page 4 has no links, and no link leads to page 0."""
    links = (np.random.default_rng(3).random((11, 11)) < 0.3).astype(float)
    links[:, 4], links[0, :] = 0, 0
    P = np.where(links.sum(axis=0) > 0, links / np.maximum(links.sum(axis=0), 1), 1 / 11)
    values, vectors = np.linalg.eig(0.85 * P + 0.15 / 11)
    expected = vectors[:, np.argmax(values.real)].real
    for A in matrices(comm, links):
        r = example("pagerank").pagerank(A)
        assert np.allclose(r, expected / expected.sum()) and same_on_all(comm, r)


def test_gaussian_process_on_every_grid(comm: Any) -> None:
    module, x, new, y = example("gaussian_process"), drawn(31, 4), drawn(31, 4)[:13] + 0.3, drawn(31, 1)[:, 0]
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    there = GaussianProcessRegressor(RBF(np.sqrt(1 / 0.4), "fixed"), alpha=0.5).fit(x, y)
    expected, deviation = there.predict(new, return_std=True)
    for A, B in zip(matrices(comm, x), matrices(comm, new)):
        L, w, likelihood = module.fit(A, y, 0.2, 0.5)
        mean, variance = module.predict(A, B, L, w, 0.2, 0.5)
        assert np.isclose(likelihood, there.log_marginal_likelihood_value_)
        assert np.allclose(mean, expected) and np.allclose(variance, deviation**2 + 0.5)


def test_least_squares_on_every_grid(comm: Any) -> None:
    """Two columns are nearly equal: the normal equations lose digits, a QR factorisation does not."""
    x, b = drawn(41, 5), drawn(41, 6)[:, 5]
    x[:, 1] = x[:, 0] + 1e-5 * x[:, 1]
    exact = np.linalg.lstsq(x, b)[0]
    for A in matrices(comm, x):
        normal, x = example("least_squares").normal_equations(A, b), lstsq(A, b)[0]
        errors = [np.linalg.norm(y - exact) / np.linalg.norm(exact) for y in (normal, x)]
        assert errors[1] < 1e-9 < 1e-8 < errors[0] and same_on_all(comm, x)


def test_modes_of_a_plate_on_every_grid(comm: Any) -> None:
    """Frequencies equal SciPy's for the whole matrices; modes are orthonormal with respect to the mass matrix."""
    module, side = example("vibrating_plate"), 6
    mass = module.masses(side, 4.0)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            K = module.stiffness(side, grid)
            frequencies, V = module.modes(K, mass, 5)
            k = K.allgather()
        expected = np.sqrt(scipy.linalg.eigh(k, np.diag(mass.ravel()), eigvals_only=True)[:5])
        assert mass.sum() == 27 + 9 * 4 and np.allclose(frequencies, expected)
        assert np.allclose(V.T @ (mass.ravel()[:, None] * V), np.eye(5)) and same_on_all(comm, frequencies)
        assert np.allclose(k @ V, mass.ravel()[:, None] * V * frequencies**2, atol=1e-7 * np.abs(k).max())
