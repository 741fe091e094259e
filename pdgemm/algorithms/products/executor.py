"""The interface of an algorithm on one rank: the arguments of a product and the executor made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, TypeVar

from pdgemm.algorithms.products.strips import NO_STRIPS, Strips
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import Combine, paired
from pdgemm.planning.algorithm_registry import algorithm_of
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.reduction import Window
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.store import store

PlanBuffers = dict[str, Any]  # the buffers of a plan
Notify = Callable[[int, int], object]
Planned = TypeVar("Planned", bound=Product, covariant=True)


@dataclass(frozen=True)
class Call(Generic[Planned]):
    """The arguments of C := alpha A B + beta C on one rank, with buffers and communication.

    A, B, C : this rank's local arrays, in the layouts of `product`; A and B are not changed, C is overwritten.
    grid    : the process grid; messages are sent along its rows, columns and layers.
    workspace : the buffers of the product; nothing else is allocated.
    peers   : the arrays of the other ranks of the node, where panels or partial sums are read in place.
    transfers : tracks the messages in flight to this rank.
    windows : windows of rows of C.  The last panels are multiplied window by window, and `completed` is called when a
        window is complete.  If there are no windows, `completed` is not called.
    mirrored : B is A^H or A^T.
    scales   : the scales by which panels of A and of B are multiplied when they are converted.
    """

    alpha: Any
    A: Array
    B: Array
    C: Array
    product: Planned
    grid: ProcessGrid
    workspace: PlanBuffers
    peers: NodeArrays | None
    transfers: Transfers
    windows: Sequence[Window] = ()
    completed: Callable[[Window], object] = lambda window: None
    mirrored: bool = False
    scales: Strips = NO_STRIPS

    @cached_property
    def poll(self) -> Callable[[], None] | None:
        """The function to call every few milliseconds of a product on the host; None: no polling is needed."""
        return self.transfers.poll if self.grid.ranks_per_node and not self.product.device else None

    def multiply_c(self, beta: Any, recorder: Recorder) -> None:
        """Compute C := beta C; called if there is nothing to multiply."""
        with recorder.phase("compute"):
            store(self.C, None, self.to_c(beta), within=self.product.kept(self.grid.comm.rank))

    def to_c(self, beta: Any) -> Combine:
        """Return the operation C := sums + beta C."""
        return Combine(1, beta, paired(self.workspace["update"]))


class Executor(Protocol):
    """Runs an algorithm on one rank: it is set up once from a `Call` and may then be called any number of times."""

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        """Compute C := alpha A B + beta C from the current elements of A, B and C.  Collective over the grid.

        beta : C is not read if beta is 0.   recorder : records seconds, words and messages.   notify : is called after
        each step with the number of this step and the number of all steps; `notify` must not raise.
        """


def executor_of(call: Call[Product]) -> Executor:
    """Set up the algorithm of a product on this rank, and return the executor.  Local."""
    make: Callable[[Call[Product]], Executor] = _named(algorithm_of(call.product).executor)
    return make(call)


_named = cache(resolve_name)  # the classes of executors by name
