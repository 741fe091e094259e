"""Conversion of a program's data: blocks on the ranks to and from a DistMatrix, and dask arrays to a DistMatrix."""

from pdgemm.algorithms.blocks import from_blocks as from_blocks, to_blocks as to_blocks
from pdgemm.interop.dask_arrays import from_dask as from_dask
