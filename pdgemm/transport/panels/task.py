"""What one rank has for a panel algorithm: its matrices, its buffers, and the ways of a panel to the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

from mpi4py import MPI

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule, Window
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.movers.ring import ring

Planned = TypeVar("Planned", bound=PanelSchedule, covariant=True)
Line = Literal["row", "col"]
Part = Window | slice  # of a matrix, of a vector
Parts = dict[int, Array]  # by the position of a rank in the grid column
Read = Callable[[int, Array, Array], object]  # called with an owner, what it has, and a target
Store = Callable[[Array, Array], object]  # called with a target, and what has come for it
Copies = list[Callable[[], object]]  # to be carried out when the arrivals of a slot are complete
PANEL, DIAGONAL, TRANSPOSED = 0, 2, 4  # tags of what travels, for two slots each


@dataclass
class Task(ABC, Generic[Planned]):
    """Holds all that one rank needs for a panel algorithm, and lets panels travel: they are read `InPlace`, or `Sent`.

    arrays    : this rank's local arrays by name, in the layouts of the schedule.
    grid      : the process grid; panels travel along its rows and columns.
    workspace : the buffers of the schedule; nothing large is allocated beyond them.

    All ranks of a line of the grid `bring` a panel; in a grid column ranks `publish` parts of what they have, and
    others `fetch` them.  What travels is complete after `wait`; what it came from may be rewritten after `free`.
    """

    schedule: Planned
    arrays: dict[str, Array]
    grid: ProcessGrid
    workspace: dict[str, Any]
    transfers: Transfers
    recorder: Recorder

    @abstractmethod
    def bring(
        self, line: Line, root: int, name: str, part: Part, buffer: Array, slot: Slot, tag: int, ready: bool = False
    ) -> Array:  # fmt: skip
        """Start to bring a window of root's matrix, or a part of its vector, to all ranks of a grid row or column.

        ready : that is not written to while the algorithm runs, so that nobody has to wait before reading it.
        Returns the array that holds it when the slot's arrivals are complete: the window itself where it can be read,
        else a part of `buffer`.
        """

    @abstractmethod
    def bring_transposed(self, panel: Panel, rows: Array, name: str, into: Array, buffer: Array, slot: Slot) -> Copies:
        """Start to bring those rows of a panel to each rank whose indices are those of its columns behind the panel.

        rows : this rank's rows of the panel, which may be on their way.   into : their transpose is of these rows.
        Returns copies of the rows to `into`.
        """

    @abstractmethod
    def publish(self, readers: Sequence[int], packed: Callable[[int, Array], Array], slot: Slot, tag: int) -> None:
        """Let ranks at these positions of the grid column have parts of an array, which they fetch.

        packed : returns the part of a reader, contiguous, if need be in the array that it is given, of `slot.buffer_b`.
        """

    @abstractmethod
    def fetch(
        self, name: str, targets: Parts, read: Read, slot: Slot, tag: int, buffer: Array = None, store: Store = CONVERT
    ) -> Copies:  # fmt: skip
        """Start to bring parts of the arrays that owners, by their positions in the grid column, publish to this rank.

        read : called with an owner, its whole array and its target, where arrays can be read.
        buffer : messages are received here, and `store` is called with a target and its message; None: they are
            received in the target, which is contiguous.
        """

    @abstractmethod
    def slabs(self, length: int, flops: float) -> Iterator[slice]:
        """Yield in what slabs of its longer side a product is made, after each of which messages make progress."""

    def release(self, owners: Sequence[int], slot: Slot) -> None:
        """Tell owners in the grid column that what they have has been read; the slot waits until they say the same."""

    def finish(self) -> None:
        """Wait until no rank reads what another one has.  Collective over the grid."""

    def update(self, A: Array, B: Array, C: Array, alpha: float = -1, conjugate_b: bool = False) -> None:
        """C := C + alpha A B, in slabs between which messages make progress."""
        m, n = C.shape
        with self.recorder.phase("compute"):
            for slab in self.slabs(max(m, n), 2 * m * n * A.shape[1]):
                a, b, c = (A[slab], B, C[slab]) if m >= n else (A, B[:, slab], C[:, slab])
                gemm_accumulate(alpha, a, b, 1, c, conjugate_b=conjugate_b)

    def wait(self, slot: Slot) -> None:
        """Wait until all that comes to a slot has arrived."""
        self.transfers.wait(slot.arrivals)

    def free(self, slot: Slot) -> Slot:
        """Return a slot after waiting until its buffers may be rewritten."""
        self.transfers.wait(slot.users)
        self.finish_products()
        return slot

    def packing(self) -> Any:
        """Return the phase in which panels are copied; a device copies what its products have written before."""
        self.recorder.order_copies_after_products()
        return self.recorder.phase("pack")

    def copied(self) -> None:
        """Let the products that follow wait, on a device, for what was copied last."""
        for copies in self.recorder.record_copies():
            copies.Wait()

    def finish_products(self) -> None:
        """Wait, on a device, until all products so far are complete: others read them, or their operands change."""
        for wait in self.recorder.record_products(self.transfers.poll):
            wait()

    def comm(self, line: Line) -> MPI.Comm:
        return self.grid.row if line == "row" else self.grid.col

    def send(self, line: Line, x: Array, root: int, slot: Slot, tag: int) -> None:
        """Start to send a contiguous x from root around a line of the grid; slots use tags of their own."""
        slot.tag = tag + slot.number
        ring(self.comm(line), wire(x), root, slot, self.recorder)

    def transposition(self, panel: Panel) -> tuple[BlockCyclic, BlockCyclic, dict[int, IndexMap]]:
        """Return the rows and columns behind a panel, and by grid row the map from its rows to this rank's columns."""
        A, (i, j) = self.schedule.A.distribution, self.grid.coords
        rows, cols = (x.window(panel.stop, x.n) for x in (A.rows, A.cols))
        maps = _maps(rows, cols, j)
        return rows, cols, {r: maps[r] for r in sorted(maps, key=lambda r: r != i)}  # what others wait for first


@lru_cache(maxsize=1 << 10)
def _maps(rows: BlockCyclic, cols: BlockCyclic, part: int) -> dict[int, IndexMap]:
    """Return the map from the rows of each part that has some of a part's columns to these columns."""
    return dict(index_maps(rows, cols, part, by_target=True))
