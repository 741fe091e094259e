"""PDGEMM, PDTRAN and PDGEMR2D with ScaLAPACK's arguments: descriptors, column-major local arrays, indices from 1.

The arguments are those of ScaLAPACK, in the same order:

    ictxt = blacs_gridinit(comm, 2, 3)
    nprow, npcol, myrow, mycol = blacs_gridinfo(ictxt)
    desca = descinit(m, k, mb, kb, 0, 0, ictxt, lld)
    pdgemm("N", "T", m, n, k, 1.0, a, 1, 1, desca, b, 1, 1, descb, 0.0, c, 1, 1, descc)

Every routine is collective over the processes of the context, those outside its grid included.  Local arrays are
NumPy arrays with contiguous columns, or one-dimensional; nothing is copied, C is updated in place.  Unlike in
ScaLAPACK, sub(A), sub(B) and sub(C) may have any alignment, and belong to contexts of different shapes.
If an argument is illegal on any process, all raise IllegalArgument for it; INFO counts the entries of the
descriptor as it was passed.

Blackford et al., ScaLAPACK Users' Guide, 1997, ch. 4; Choi et al., A proposal for a set of Parallel Basic Linear
Algebra Subprograms, LAPACK Working Note 100, 1995.
"""

from pdgemm.scalapack.blacs import blacs_gridexit, blacs_gridinfo, blacs_gridinit, context
from pdgemm.scalapack.descriptors import (
    CSRC_,
    CTXT_,
    DTYPE_,
    LLD_,
    M_,
    MB_,
    N_,
    NB_,
    RSRC_,
    IllegalArgument,
    descinit,
    descinit2,
    numroc,
)
from pdgemm.scalapack.pblas import (
    pcgemm,
    pcgemr2d,
    pctranc,
    pctranu,
    pdgemm,
    pdgemr2d,
    pdtran,
    pigemr2d,
    psgemm,
    psgemr2d,
    pstran,
    pzgemm,
    pzgemr2d,
    pztranc,
    pztranu,
)

__all__ = [
    "CSRC_", "CTXT_", "DTYPE_", "LLD_", "MB_", "M_", "NB_", "N_", "RSRC_", "IllegalArgument",
    "blacs_gridexit", "blacs_gridinfo", "blacs_gridinit", "context", "descinit", "descinit2", "numroc",
    "pcgemm", "pcgemr2d", "pctranc", "pctranu", "pdgemm", "pdgemr2d", "pdtran", "pigemr2d", "psgemm", "psgemr2d",
    "pstran", "pzgemm", "pzgemr2d", "pztranc", "pztranu",
]  # fmt: skip
