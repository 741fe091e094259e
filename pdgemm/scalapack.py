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
If an argument is illegal on any process, all processes raise IllegalArgument for this argument; for a descriptor,
INFO counts the entries of the descriptor type (1 or 2) that was passed.

Blackford et al., ScaLAPACK Users' Guide, 1997, ch. 4; Choi et al., A proposal for a set of Parallel Basic Linear
Algebra Subprograms, LAPACK Working Note 100, 1995.
"""

from functools import partial

from pdgemm.interop.scalapack import blacs, copies, descriptors, eigen, lapack, orthogonal, pblas
from pdgemm.interop.scalapack.argument_lists import check_call, family
from pdgemm.interop.scalapack.blacs import *  # noqa: F403
from pdgemm.interop.scalapack.descriptors import *  # noqa: F403

_check = partial(check_call, compared=False)  # products and transposes compare their arguments
psgemm, pdgemm, pcgemm, pzgemm = family("p?gemm", "s d c z", pblas.p_gemm, _check)
pssyrk, pdsyrk, pcsyrk, pzsyrk = family("p?syrk", "s d c z", pblas.p_syrk)
pcherk, pzherk = family("p?herk", "c z", pblas.p_herk)
pssyr2k, pdsyr2k, pcsyr2k, pzsyr2k = family("p?syr2k", "s d c z", pblas.p_syr2k)
pcher2k, pzher2k = family("p?her2k", "c z", pblas.p_her2k)
pssymm, pdsymm, pcsymm, pzsymm = family("p?symm", "s d c z", pblas.p_symm)
pchemm, pzhemm = family("p?hemm", "c z", pblas.p_symm)
pstrmm, pdtrmm, pctrmm, pztrmm = family("p?trmm", "s d c z", pblas.p_triangular)
pstrsm, pdtrsm, pctrsm, pztrsm = family("p?trsm", "s d c z", pblas.p_triangular)
pstran, pdtran = family("p?tran", "s d", pblas.p_tran, _check)
pctranu, pztranu = family("p?tranu", "c z", pblas.p_tran, _check)
pctranc, pztranc = family("p?tranc", "c z", pblas.p_tran, _check)
pigemr2d, psgemr2d, pdgemr2d, pcgemr2d, pzgemr2d = family("p?gemr2d", "i s d c z", copies.p_gemr2d, copies.check_copy)

pspotrf, pdpotrf, pcpotrf, pzpotrf = family("p?potrf", "s d c z", lapack.p_potrf)
pspotrs, pdpotrs, pcpotrs, pzpotrs = family("p?potrs", "s d c z", lapack.p_potrs)
pspotri, pdpotri, pcpotri, pzpotri = family("p?potri", "s d c z", lapack.p_potri)
psposv, pdposv, pcposv, pzposv = family("p?posv", "s d c z", lapack.p_posv)
psgetrf, pdgetrf, pcgetrf, pzgetrf = family("p?getrf", "s d c z", lapack.p_getrf)
psgetrs, pdgetrs, pcgetrs, pzgetrs = family("p?getrs", "s d c z", lapack.p_getrs)
psgetri, pdgetri, pcgetri, pzgetri = family("p?getri", "s d c z", lapack.p_getri)
psgesv, pdgesv, pcgesv, pzgesv = family("p?gesv", "s d c z", lapack.p_gesv)

psgeqrf, pdgeqrf, pcgeqrf, pzgeqrf = family("p?geqrf", "s d c z", orthogonal.p_geqrf)
psgeqpf, pdgeqpf, pcgeqpf, pzgeqpf = family("p?geqpf", "s d c z", orthogonal.p_geqpf)
psorgqr, pdorgqr, pcungqr, pzungqr = family("p?gqr", "sor dor cun zun", orthogonal.p_ungqr)
psormqr, pdormqr, pcunmqr, pzunmqr = family("p?mqr", "sor dor cun zun", orthogonal.p_unmqr)

pssyevd, pdsyevd, pcheevd, pzheevd = family("p?evd", "ssy dsy che zhe", eigen.p_evd)
pssyevr, pdsyevr, pcheevr, pzheevr = family("p?evr", "ssy dsy che zhe", eigen.p_evr)
pssygvd, pdsygvd, pchegvd, pzhegvd = family("p?gvd", "ssy dsy che zhe", eigen.p_gvd)
psgesvd, pdgesvd, pcgesvd, pzgesvd = family("p?gesvd", "s d c z", eigen.p_gesvd)

_routines = [name for name, x in vars().items() if getattr(x, "__module__", "") == __name__]
__all__ = [*blacs.__all__, *descriptors.__all__, *_routines]
