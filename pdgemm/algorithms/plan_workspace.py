"""The buffers of a plan on one rank, which are allocated before any message is sent."""

from __future__ import annotations

from operator import mul
from typing import Any

from pdgemm.grids.layout import Layout
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.transport.exchange_buffers import ExchangeBuffers
from pdgemm.transport.movers.panel_views import held_panel


class Workspace:
    """All buffers of one rank for a plan, allocated before any message is sent."""

    def __init__(self, plan: ProductPlan, A: DistMatrix, B: DistMatrix) -> None:
        grid, rank, device = A.grid, A.grid.comm.rank, devices.of(A.stored)
        own, exposed = devices.own_memory(device), bool(plan.product.exposed)
        shared = devices.shared_memory(device, grid)

        def like(layout: Layout, exposed: bool) -> Array:
            rows, cols = layout.local_shape(rank)
            memory = (shared if exposed else own).empty((plan.held_words(layout, rank),), layout.dtype)
            return held_panel(rows, layout.order, cols, memory)

        in_node_memory = plan.product.exposed_buffers
        self.product: dict[str, Any] = {
            name: (shared if name in in_node_memory else own).empty((words,), dtype)
            for name, (words, dtype) in plan.buffers(rank).items()
        }
        if device:
            staged = plan.product.staged_buffers(rank).items()
            self.product |= {name: device.pinned(words, dtype) for name, (words, dtype) in staged}
        self.messages = {name: ExchangeBuffers(move, rank, device, grid.memory) for name, move in plan.moves}
        self.copies = {
            name: like(*((move.source, move.shared) if name == "C" else (move.target, exposed and name in ("A", "B"))))
            for name, move in plan.moves
        }
        self.sums = like(plan.sums, exposed=False) if plan.sums else None
        self.repeated = {name: own.empty(x.local_shape(rank), x.dtype) for name, x in plan.repeated.items()}
        self.staged = {name: like(layout, exposed=True) for name, layout in plan.staged.items()}
        checks = plan.protection.buffers(rank).items() if plan.protection else ()
        self.checks = {name: own.empty((words,), dtype) for name, (words, dtype) in checks}
        kinds: dict[str, dict[str, Any]] = {
            "": self.product, "messages of ": self.messages, "checksums: ": self.checks, "repeated ": self.repeated,
            "copy of ": self.copies, "shared copy of ": self.staged, "sums of C": {"": self.sums} if plan.sums else {},
        }  # fmt: skip
        copies = [*self.copies.values(), *self.staged.values(), *kinds["sums of C"].values()]
        gaps = sum(max(map(mul, x.shape, x.strides)) - x.nbytes for x in copies if x.size)  # between rows
        self.sizes = {f"{kind}{name}": x.nbytes for kind, buffers in kinds.items() for name, x in buffers.items()}
        self.nbytes = sum(self.sizes.values()) + gaps
