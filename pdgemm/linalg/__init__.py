"""Linear algebra on top of the product: factorisations, solves and functions of matrices.

As for `@`, operands may also be lists and arrays, the same on every rank; a 2-D array is distributed first.  Matrices
of integers are converted to float64, as in NumPy, except by `kron`, `matrix_power`, `matvec`, `norm` and `outer`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from pdgemm.algorithms.planned_program import matrices_in, program_of
from pdgemm.errors import ArgumentError
from pdgemm.linalg.eigen.eigh import eigh, eigvalsh, inertia
from pdgemm.linalg.factors.cholesky import cho_factor, cho_solve, cholesky
from pdgemm.linalg.factors.householder import householder_qr
from pdgemm.linalg.factors.lu import LU, det, lu, lu_factor, lu_solve, slogdet
from pdgemm.linalg.factors.operands import takes_arrays
from pdgemm.linalg.factors.qr import qr
from pdgemm.linalg.factors.rank_k import gram, her2k, herk, syr2k, syrk
from pdgemm.linalg.factors.solve import inv, solve
from pdgemm.linalg.factors.symmetric import hemm, symm
from pdgemm.linalg.factors.triangular import inv_triangular, solve_triangular, trmm
from pdgemm.linalg.functions.matrix_functions import expm, kron, matrix_power, matvec, newton_schulz, outer, sqrtm
from pdgemm.linalg.functions.polar import matrix_sign, polar
from pdgemm.linalg.singular.lstsq import lstsq
from pdgemm.linalg.singular.norms import cond, norm
from pdgemm.linalg.singular.singular_values import matrix_rank, pinv, svdvals
from pdgemm.linalg.singular.svd import svd
from pdgemm.local.arrays.arguments import as_count
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.program import Program
from pdgemm.support.agreement import described_elements, together

__all__ = [
    "LU",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "cond",
    "det",
    "eigh",
    "eigvalsh",
    "expm",
    "gram",
    "hemm",
    "her2k",
    "herk",
    "householder_qr",
    "inertia",
    "inv",
    "inv_triangular",
    "kron",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_power",
    "matrix_rank",
    "matrix_sign",
    "matvec",
    "newton_schulz",
    "norm",
    "outer",
    "pinv",
    "plan",
    "polar",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "sqrtm",
    "svd",
    "svdvals",
    "symm",
    "syr2k",
    "syrk",
    "trmm",
]
globals().update({name: takes_arrays(globals()[name]) for name in __all__ if name not in ("LU", "plan")})


def plan(
    function: Callable[..., Any] | str,
    /,
    *arguments: Any,
    machine: Machine | None = None,
    iterations: int | None = None,
    **options: Any,
) -> Program:
    """Return the program of a function call without making the call.  Collective over the grid of the first matrix.

        print(linalg.plan(linalg.cholesky, A))
        linalg.plan("solve", A, B, assume_a="pos").seconds

    function  : any function of matrices: one of `pdgemm.linalg`, or its name; `pdgemm.pdgemm`; a function of the user
        that calls such functions, and reads no elements itself; or a `functools.partial`, whose arguments precede
        `arguments`.
    arguments, options : the arguments of the function, at least one of them a matrix; no element of a matrix is read.
    machine   : as for `pdgemm.plan`.
    iterations : the number of iterations to plan where it depends on elements; by default 6 steps of `polar` (the
        last one by products only), 8 of `svd` with k, of `sqrtm` and of `matrix_sign`, 20 of `eigh` with k, 40 Lanczos
        steps for a 2-norm, and 2 corrections of `solve` with refine, or 4 iterations of GMRES.

    The program is a value: `traffic(rank)` returns the words and messages of a rank, as a run counts them; `flops`,
    `seconds` and `extra_bytes(rank)` are its costs; and `simulate()` simulates all messages.  For a matrix in a
    file (`svd` and `pdgemm`) a stage has the number of panels to read, and `bytes_read` their size; `seconds` does not
    include the reads.
    The code of the function itself is run on matrices without elements.  Where a step depends on elements, the step of
    most matrices is planned: LU exchanges random rows, QR with pivoting exchanges random columns, CholeskyQR makes two
    passes, norms are 1, no rows or columns are scaled, matrices have full rank, refinement converges, and `eigh`
    deflates nothing, finds all eigenvalues in an interval, and halves a spectrum.
    Reductions and gathers of norms, diagonals and other vectors to all ranks are stages, too.  The ranks' comparisons
    of their arguments, and of numbers that must be the same to the bit, are not.
    In a plan, ranks that share memory read panels in place; other ranks send them.
    Raises ArgumentError where `function` is not a function, or does not take these arguments, and the errors of the
    function; on all ranks.
    """
    named: Any = globals().get(function) if isinstance(function, str) and function in __all__ else function
    if isinstance(named, partial):
        named, arguments, options = named.func, (*named.args, *arguments), named.keywords | options
    matrices, arrays = matrices_in(*arguments, *options.values())
    comm = matrices[0].grid.comm if matrices else communicator(A=next(iter(arguments), None))
    with together(comm) as described:
        if not callable(named):
            names = ", ".join(__all__)
            raise ArgumentError(f"plan takes a function of matrices, or one of the names {names}; got {function!r}")
        name = getattr(named, "__name__", repr(named))
        try:
            signature(named).bind(*arguments, **options)
        except TypeError as wrong:
            names = ", ".join(signature(named).parameters)
            raise ArgumentError(f"plan({name}, ...) takes the arguments of {name}, {names}: {wrong}") from None
        steps = None if iterations is None else as_count(iterations, "iterations", 1)
        others = [x for x in (*arguments, *options.items()) if not matrices_in(x)[0] and not matrices_in(x)[1]]
        described += ["linalg.plan", name, others, steps, machine]
        described += [repr(x.layout_in(x.grid) if isinstance(x, DistMatrix) else x) for x in matrices]
        described += [f"{x.dtype} {described_elements(x)}" for x in arrays]
        return program_of(named, *arguments, machine=machine, iterations=steps, **options)
