"""pylops-mpi's MPIMatrixMult, in its native layout."""

from __future__ import annotations

from collections.abc import Iterator

from peers.worker import Block, Maker, Setting, Way, filled, nothing, part, product


def makers(setting: Setting) -> Iterator[Maker]:
    side = round(setting.comm.size**0.5)
    if setting.layout == "columns":
        raise ValueError("only its native layout is supported")
    if side**2 != setting.comm.size:
        raise ValueError("the number of ranks must be a square")
    yield lambda: make(setting, side)


def make(setting: Setting, side: int) -> Way:
    """Return a product.   "summa": blocks on a square grid.  "block": A by rows, B by columns, each on `side` ranks."""
    from pylops_mpi import DistributedArray, MPIMatrixMult, Partition  # takes seconds, so only after the checks

    comm, (m, n, k), whole = setting.comm, setting.mnk, slice(None)
    i, j = divmod(comm.rank, side)
    summa = setting.variant == "summa"
    A = filled((m, k), part(m, side, i if summa else j), part(k, side, j) if summa else whole, 1, setting.dtype)
    B = filled((k, n), part(k, side, i) if summa else whole, part(n, side, j if summa else i), 2, setting.dtype)
    multiplication = MPIMatrixMult(A.values, n, kind=setting.variant, base_comm=comm, dtype=setting.dtype)
    sizes = comm.allgather(B.values.size)
    x = DistributedArray(
        global_shape=sum(sizes), local_shapes=sizes, partition=Partition.SCATTER, dtype=setting.dtype, base_comm=comm
    )
    x[:] = B.values.ravel()
    result: list[DistributedArray] = []

    def run() -> None:
        result[:] = [multiplication @ x]

    def blocks() -> tuple[Block, Block, Block]:
        rows = A.rows if summa else range(m)
        C = Block(rows, B.cols, result[0].local_array.reshape(len(rows), len(B.cols)))
        if summa:
            return A, B, C
        return A if i == 0 else nothing(), B if j == 0 else nothing(), C if j == 0 else nothing()

    return product(setting, f"grid {side} x {side}", run, blocks)
