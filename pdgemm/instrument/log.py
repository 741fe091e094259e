"""The logger "pdgemm" of Python's `logging`, which writes nothing unless a program enables it.

INFO, from rank 0: the plan of each product in one line, before it runs, and its report after it.
DEBUG: from rank 0 the mover of the panels and the reasons for the plan, and from every rank its buffers.
Logging sends no messages.  A product checks the level of the logger once for its plan and once for its report; these
checks take a tenth of a microsecond.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pdgemm.support.text import in_bytes

INFO = logging.INFO
LOG = logging.getLogger("pdgemm")
LOG.addHandler(logging.NullHandler())


def log_plan(rank: int, plan: object, mover: str, why: Callable[[], str], buffers: Mapping[str, int]) -> None:
    """Log the plan that is about to run, and the buffers of this rank.  Local.

    mover : the mover of the panels, with a description.   why : a function that returns the reasons for the choice.
    buffers : bytes of each buffer on this rank, by name.
    """
    if not rank:
        LOG.info("plan: %s", plan)
    if not LOG.isEnabledFor(logging.DEBUG):
        return
    if not rank:
        LOG.debug("mover of the panels: %s", mover)
        LOG.debug("considered:\n%s", why())
    listed = ", ".join(f"{name} {in_bytes(size)}" for name, size in buffers.items() if size)
    LOG.debug("rank %d allocates %s%s", rank, in_bytes(sum(buffers.values())), f": {listed}" if listed else "")
