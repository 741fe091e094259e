"""The logger "pdgemm" of Python's `logging`, which writes nothing unless a program asks for it.

INFO, from rank 0: the plan of each product in one line, before it runs, and its report after it.
DEBUG: from rank 0 how panels travel and why this plan was chosen, and from every rank its buffers.
Nothing is sent for it.  A product asks the logger once for its plan and once for its report, which takes a tenth of a
microsecond.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pdgemm.support.text import in_bytes

INFO = logging.INFO
LOG = logging.getLogger("pdgemm")
LOG.addHandler(logging.NullHandler())


def log_plan(rank: int, plan: object, mover: str, why: Callable[[], str], buffers: Mapping[str, int]) -> None:
    """Log what is about to run.  Local.

    mover : the way in which panels travel, with a description.   buffers : their bytes on this rank, by name.
    """
    if not rank:
        LOG.info("plan: %s", plan)
    if not LOG.isEnabledFor(logging.DEBUG):
        return
    if not rank:
        LOG.debug("panels travel by %s", mover)
        LOG.debug("considered:\n%s", why())
    listed = ", ".join(f"{name} {in_bytes(size)}" for name, size in buffers.items() if size)
    LOG.debug("rank %d allocates %s%s", rank, in_bytes(sum(buffers.values())), f": {listed}" if listed else "")
