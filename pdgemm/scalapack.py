"""Products, solves, factorisations, eigenproblems and singular values with ScaLAPACK's arguments.

Matrices have descriptors and column-major local arrays, and indices start at 1.

The arguments are those of ScaLAPACK, in the same order:

    ictxt = blacs_gridinit(comm, 2, 3)
    nprow, npcol, myrow, mycol = blacs_gridinfo(ictxt)
    desca = descinit(m, k, mb, kb, 0, 0, ictxt, lld)
    pdgemm("N", "T", m, n, k, 1.0, a, 1, 1, desca, b, 1, 1, descb, 0.0, c, 1, 1, descc)

Every routine is collective over the processes of the context, including processes outside its grid.  Local arrays are
NumPy arrays with contiguous columns, or one-dimensional arrays; results are stored in these arrays.  Unlike in
ScaLAPACK, sub(A), sub(B) and sub(C) may have any alignment, and belong to contexts of different shapes.
If an argument is illegal on any process, all processes raise IllegalArgument for this argument; INFO counts the entries
of the descriptor in the type that was passed.

Blackford et al., ScaLAPACK Users' Guide, 1997, ch. 4; Choi et al., A proposal for a set of Parallel Basic Linear
Algebra Subprograms, LAPACK Working Note 100, 1995.
"""

from pdgemm.interop.scalapack import blacs, descriptors, eigen, lapack, orthogonal, pblas
from pdgemm.interop.scalapack.blacs import *  # noqa: F403
from pdgemm.interop.scalapack.descriptors import *  # noqa: F403
from pdgemm.interop.scalapack.eigen import *  # noqa: F403
from pdgemm.interop.scalapack.lapack import *  # noqa: F403
from pdgemm.interop.scalapack.orthogonal import *  # noqa: F403
from pdgemm.interop.scalapack.pblas import *  # noqa: F403

__all__ = [*blacs.__all__, *descriptors.__all__, *eigen.__all__, *lapack.__all__, *orthogonal.__all__, *pblas.__all__]
