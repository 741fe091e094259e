"""How data of a program gets into a DistMatrix and out of it: blocks that its ranks have, and dask's arrays."""

from pdgemm.algorithms.blocks import from_blocks as from_blocks
from pdgemm.algorithms.blocks import to_blocks as to_blocks
from pdgemm.interop.dask_arrays import from_dask as from_dask
