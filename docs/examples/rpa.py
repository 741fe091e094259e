"""The random phase approximation: a polarisability at imaginary frequencies, and the correlation energy from it.

With three-index integrals B_P,ia of o occupied and v virtual orbitals, and Δ_ia = ε_a - ε_i, the polarisability of both
spins is Π_PQ(iω) = -4 Σ_ia B_P,ia B_Q,ia Δ_ia / (Δ_ia² + ω²), and the energy E = ∫ [ln det(1 - Π) + tr Π] dω / 2π from
0 to ∞ (Ren, Rinke, Joas & Scheffler, J. Mater. Sci. 47, 2012).  The integral is a sum over the nodes of Gauss and
Legendre at ω = (1 + x)/(1 - x).  One plan serves all frequencies.
The file has random integrals; your own file is read in the same way.  The check is another formula: E = Σ (Ω - tr A)/2
over the excitation energies, Ω² being the eigenvalues of Δ² + 4 Δ^½ BᵀB Δ^½ (Furche, J. Chem. Phys. 129, 2008).
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

from pdgemm import ProcessGrid, einsum, linalg, plan_einsum
from pdgemm.io import hdf5

POLARISABILITY = "Pia,ia,Qia->PQ"


def write_integrals(path, aux, o, v, seed=2):
    """Write B[P, i, a] as /B, and the energies of occupied and virtual orbitals."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["B"] = rng.standard_normal((aux, o, v)) / np.sqrt(aux * o)
        file["occupied"], file["virtual"] = -2 + np.sort(rng.random(o)), 1 + 3 * np.sort(rng.random(v))


def quadrature(number):
    """Return nodes and weights on [0, ∞)."""
    x, weight = np.polynomial.legendre.leggauss(number)
    return (1 + x) / (1 - x), 2 * weight / (1 - x) ** 2


def polarisability(B, gaps, frequency, plan):
    """Return Π(iω) as a tensor."""
    return einsum(POLARISABILITY, B, gaps / (gaps**2 + frequency**2), B, alpha=-4, optimize=plan)


def integrand(Pi):
    """Return ln det(1 - Π) + tr Π."""
    Pi = Pi.matrix([0], [1])
    sign, logarithm = linalg.slogdet(np.eye(len(Pi)) - Pi)
    assert sign == 1  # -Π is positive semidefinite
    return logarithm + np.trace(Pi)


def plasmon_energy(B, gaps):
    """Return the correlation energy by excitation energies: eigenvalues of a matrix of order o v."""
    root = np.sqrt(gaps.ravel())
    K = B.matrix([0])
    H = 4 * (K.T @ K) * root * root[:, None] + np.diag(gaps.ravel() ** 2)
    excitations = np.sqrt(linalg.eigvalsh(H))
    return (excitations - gaps.ravel()).sum() / 2 - np.trace(K.T @ K)


def main(*arguments):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--auxiliary", type=int, default=60)
    add("--occupied", type=int, default=5)
    add("--virtual", type=int, default=20)
    add("--points", type=int, default=16, help="of the quadrature")
    add("--folder", type=Path, default=".", help="where three_index.h5 and the picture are written")
    options, grid = parser.parse_args(arguments or None), ProcessGrid()
    path = Path(options.folder) / "three_index.h5"
    if grid.rank == 0:  # your file is there already
        write_integrals(path, options.auxiliary, options.occupied, options.virtual)
    grid.comm.Barrier()

    B = hdf5.load(path, "B", grid)
    with h5py.File(path) as file:
        gaps = file["virtual"][:] - file["occupied"][:][:, None]
    plan = plan_einsum(POLARISABILITY, B, gaps.shape, B)
    nodes, weights = quadrature(options.points)
    at_nodes = [polarisability(B, gaps, x, plan) for x in nodes]
    values = np.array([integrand(x) for x in at_nodes])
    energy, expected = weights @ values / (2 * np.pi), plasmon_energy(B, gaps)

    whole, first = B.allgather(), at_nodes[0]
    by_numpy = -4 * np.einsum(POLARISABILITY, whole, gaps / (gaps**2 + nodes[0] ** 2), whole, optimize=True)
    error = max(np.abs(first - by_numpy).max() / np.abs(by_numpy).max(), np.finfo(float).eps)
    if grid.rank == 0:
        print(plan)
        print(f"{first.report.counted.words_received} words came in for rank 0 at a frequency")
        print(f"largest difference of Π from numpy.einsum: {error:.0e}")
        print(f"correlation energy by {options.points} frequencies: {energy:.6f}; by excitations: {expected:.6f}")
        draw(Path(options.folder) / "rpa.png", nodes, values, by_numpy)


def draw(path, nodes, values, Pi):
    from matplotlib.figure import Figure  # which takes a second to load: on this rank alone

    left, right = (figure := Figure(figsize=(7, 3), layout="constrained")).subplots(1, 2)
    left.semilogx(nodes, values, "o-")
    left.set(xlabel="frequency ω", ylabel="ln det(1 - Π) + tr Π", title="correlation energy, by frequency")
    right.semilogy(np.linalg.eigvalsh(-Pi)[::-1], "o", markersize=3)
    right.set(xlabel="number", title=f"eigenvalues of -Π at ω = {nodes[0]:.3f}")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
