#!/usr/bin/env python3
"""A job of a contender that is written in Python: contender.py MODULE VARIANT LAYOUT DTYPE ORDER BLOCK.

MODULE is a module of `peers`.  BLOCK is 0 for one block per rank.  peers/job.py describes input and output.
"""

import sys

from mpi4py import MPI
from peers.worker import serve

module, variant, layout, dtype, order, block = sys.argv[1:]
serve(MPI.COMM_WORLD, module, variant=variant, layout=layout, dtype=dtype, order=order, block=int(block) or None)
