"""NCCL without a GPU: operations are carried out by MPI immediately, or never (fake_cupy.py)."""

from __future__ import annotations

import ctypes
import struct
from functools import partialmethod
from itertools import count
from time import sleep
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI


def _memory(ptr: int, nbytes: int) -> np.ndarray:
    assert nbytes > 0, "NCCL is called for nothing"
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(ptr))


class Nccl:
    """The library NCCL: one rank per GPU, and the same order of calls on all ranks.

    stuck : operations of this rank never finish, until they are aborted, as if another rank did not call.
    error : the asynchronous error that NCCL reports.   world : a communicator of all ranks that have not failed.
    """

    available, NCCL_UINT8 = True, 1
    _tags = count(1)
    _group: ClassVar[list[tuple[Any, ...]]] = []
    waiting: ClassVar[set[Any]] = set()  # communicators of operations that never finish
    behind: ClassVar[set[int]] = set()  # events recorded after such operations
    stuck, error, world = False, "", MPI.COMM_WORLD
    _depth = aborted = 0

    @staticmethod
    def get_version() -> int:
        return 22703

    @classmethod
    def groupStart(cls) -> None:
        cls._depth += 1

    @classmethod
    def groupEnd(cls) -> None:
        cls._depth -= 1
        if not cls._depth:
            cls._run()

    @classmethod
    def _run(cls) -> None:
        """Carry out the operations of the group by MPI; return when all are complete.

        Messages between two ranks are matched in order.
        """
        group, cls._group = cls._group, []
        if cls.stuck:
            cls.waiting.update(communicator for _, communicator, *_ in group)
            return
        group = [(what, communicator._comm, *args) for what, communicator, *args in group]
        requests = [comm.Irecv(*args) for what, comm, *args in group if what == "recv"]
        for what, comm, *args in group:
            if what == "send":
                requests.append(comm.Issend(*args))
            elif what == "bcast":
                comm.Bcast(*args)
            elif what == "reduce":
                part, total, root = args
                in_place = part.ctypes.data == total.ctypes.data and comm.rank == root
                comm.Reduce(MPI.IN_PLACE if in_place else part, total if comm.rank == root else None, MPI.SUM, root)
        MPI.Request.Waitall(requests)

    @classmethod
    def get_unique_id(cls) -> bytes:
        return struct.pack("qq112x", cls.world.rank, next(cls._tags))

    class NcclCommunicator:
        def __init__(self, size: int, unique: bytes, rank: int) -> None:
            assert isinstance(unique, bytes) and len(unique) == 128
            root, number = struct.unpack("qq112x", unique)
            tag, world = 4000 + number % 1000, Nccl.world
            if rank == 0:
                ranks = [root] + [0] * (size - 1)
                for _ in range(size - 1):
                    place, there = world.recv(tag=tag)
                    ranks[place] = there
                for there in ranks[1:]:
                    world.send(ranks, there, tag)
            else:
                world.send((rank, world.rank), root, tag)
                ranks = world.recv(source=root, tag=tag)
            self._comm = world.Create_group(world.group.Incl(ranks), tag)

        def _queue(self, what: str, *args: Any) -> None:
            """Add an operation to the current group; outside of a group, carry it out."""
            assert self._comm is not None, "NCCL crashes: the communicator was aborted"
            Nccl._group.append((what, self, *args))
            if not Nccl._depth:
                Nccl._run()

        def _move(self, what: str, ptr: int, count: int, dtype: int, other: int, stream: int) -> None:
            assert dtype == Nccl.NCCL_UINT8
            self._queue(what, _memory(ptr, count), other)

        bcast, send, recv = partialmethod(_move, "bcast"), partialmethod(_move, "send"), partialmethod(_move, "recv")

        def reduce(self, part: int, total: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
            assert op == 0
            kind = np.dtype({2: "i4", 4: "i8", 7: "f4", 8: "f8"}[dtype])
            found, there = (_memory(ptr, count * kind.itemsize).view(kind) for ptr in (part, total))
            self._queue("reduce", found, there, root)

        def abort(self) -> None:
            """Abort without the other ranks; the communicator need not be destroyed."""
            Nccl.aborted += 1
            Nccl.waiting.discard(self)
            self._comm = None

        def check_async_error(self) -> None:
            assert self._comm is not None, "NCCL crashes: the communicator was aborted"
            if Nccl.error:
                raise RuntimeError(Nccl.error)

        def destroy(self) -> None:
            while self in Nccl.waiting:  # it waits for kernels, as NCCL does
                sleep(1e-3)
            if self._comm is not None:
                self._comm.Free()
                self._comm = None
