"""What a step that failed has left behind: it meets no other receive, and is gone with the mesh."""

from __future__ import annotations

from contextlib import nullcontext
from signal import ITIMER_REAL, SIGALRM, default_int_handler, setitimer, signal
from time import sleep
from typing import Any

import numpy as np
import pytest
from layers import numbers
from mpi4py import MPI

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, GridError
from pdgemm.instrument.recorder import Then, Traffic
from pdgemm.parallel import SGD, Buckets, Mesh, Pipeline, PipelineSchedule, ShardedOptimizer
from pdgemm.parallel import mesh as meshes
from pdgemm.parallel.dropped_messages import drop_messages
from pdgemm.parallel.layers import Embedding
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.transport.collectives import prepared_collective

pytestmark = pytest.mark.mpi
SIZES = (0, 3, 1 << 20)  # bytes; MPI libraries send large messages when they are received


@pytest.mark.on_ranks(2, 3)
def test_messages_are_dropped_and_receives_cancelled(comm: Any) -> None:
    """Small and large ones, of all ranks, on two communicators; an array that a cancelled receive has is kept."""

    class Recording(MPI.Intracomm):
        def Irecv(self, *arguments: Any) -> Any:
            posted.append(super().Irecv(*arguments))
            return posted[-1]

    posted, others = list[Any](), [rank for rank in range(comm.size) if rank != comm.rank]
    comms, x = [Recording(comm.Dup()), Recording(comm.Split())], np.ones(5 * comm.size)  # a mesh splits; see TAG_UB
    sent = [np.full(size, comm.rank, np.uint8) for size in SIZES]
    done, never, coming = [True], np.zeros(8, np.uint8), {rank: np.zeros(3, np.uint8) for rank in others}
    for turn in range(2):
        tags = turn, turn + 1, 32001  # large ones too, as a mesh with many pipelines has them
        left: list[Any] = [z.Isend(y, rank, tag) for z in comms for rank in others for tag, y in zip(tags, sent)]
        left += [comms[0].Irecv(coming[rank], rank, turn + 1) for rank in others]
        left += [comms[1].Irecv(never, rank, 100) for rank in others] + [MPI.REQUEST_NULL]
        of = tuple(range(comm.size)), (5,) * comm.size, np.dtype("d")
        kinds = Collective("all_reduce", "ring", *of), Collective("all_gather", "pairwise", *of, mover="shared")
        starts = [prepared_collective(kind, comms[0], x, 200 + at, lambda _: x) for at, kind in enumerate(kinds)]
        runs = [start(Traffic()) for start in starts if comm.rank != comm.size - 1]
        drop_messages(comms, [*left, *(Then(run, done.clear) for run in runs)])
        assert not any(z.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for z in comms)
        assert not any(left) and not any(posted) and not never.any()
        assert all((y == rank).all() or not y.any() for rank, y in coming.items())  # it may have come before
        for run in runs:
            with pytest.raises(GridError, match="was given up when its communicator was freed"):
                run.Wait()
        assert done
        for rank in others:
            coming[rank][:] = 0
        comm.Barrier()
    for z in comms:
        z.Free()


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize("fails", [False, True])
def test_products_on_the_communicator_of_a_mesh(comm: Any, fails: bool) -> None:
    """A call that is not yet received, and what a failed step has left, meet no product and no file."""
    own, x = comm.Dup(), numbers((12, 11), 1)

    def step(mesh: Any, buckets: Any, failing: int) -> None:
        for at, _ in enumerate(buckets.parameters):
            assert 1 / (comm.rank != failing or at < 2)
            mesh.sum(np.arange(5.0), axis="dp")

    with Mesh(own, dp=-1) as mesh, ProcessGrid(own, (1, own.size)) as grid, ProcessGrid(own, (own.size, 1)) as other:
        buckets = Buckets(mesh, {f"b{at}": np.ones(900) for at in range(4)}, stage=3, bucket_bytes=8)
        for failing in range(comm.size):
            if fails:
                with pytest.raises(ZeroDivisionError), mesh.raised_together():
                    step(mesh, buckets, failing)
            else:
                Embedding(mesh, 5 + failing, 3)  # of which the ranks call one another
            A, B = DistMatrix.from_global(x, grid=grid), DistMatrix.from_global(x.T, grid=mesh.grid)
            assert np.array_equal(A.redistribute(grid=other).allgather(), x)
            np.testing.assert_allclose((A @ B).allgather(), x @ x.T, rtol=1e-14)
    own.Free()


@pytest.mark.parametrize("fails", [False, True])
def test_a_mesh_is_freed_while_parameters_are_on_their_way(
    comm: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come, and after a failed step waiting for them is an error; later communicators receive nothing."""
    for words, nodes in ((90, "1"), (3 << 15, "1"), (90, "")):
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", nodes)
        mesh = Mesh(comm.Dup(), dp=-1)
        buckets = Buckets(mesh, {f"b{at}": np.ones(words) for at in range(4)}, stage=2, bucket_bytes=8)
        optimizer = ShardedOptimizer(buckets, SGD())
        for name in [*buckets.parameters][::-1]:
            buckets.gradients[name][:] = 0.25 / comm.size
            buckets.ready(name)
        optimizer.step(1.0)
        if fails:
            with pytest.raises(ZeroDivisionError), mesh.raised_together():
                assert mesh.sum(1 / (comm.rank != comm.size - 1))
        mesh.free()
        later = [comm.Dup() for _ in range(8)]
        comm.Barrier()
        assert not any(x.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for x in later)
        for x in later:
            x.Free()
        refused = 0
        for name in buckets.parameters:
            try:
                assert (buckets.parameters[name] == 0.75).all()
            except GridError:
                refused += 1
        assert not refused or fails


def interrupted_step(mesh: Any, buckets: Any, where: str) -> None:
    """A step in which the lower half of the ranks is interrupted first, and the others while they wait, or sleep."""
    if mesh.rank < mesh.grid.size // 2:
        raise KeyboardInterrupt
    before = signal(SIGALRM, default_int_handler)
    try:
        setitimer(ITIMER_REAL, 0.3)
        if where == "a sum":
            mesh.sum(np.ones(1 << 16), axis="dp+tp")
        for name in [*buckets.parameters][::-1][: 1 if where == "a bucket" else None]:  # a second one waits for it
            buckets.ready(name)
        sleep(60)
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)


@pytest.mark.parametrize("where", ["a sum", "a bucket", "buckets of a step"])
def test_a_mesh_is_freed_after_an_interrupt_of_all_ranks(comm: Any, where: str) -> None:
    """Some ranks have begun transfers that others have not: nothing hangs, or is read after it is freed."""
    mesh = Mesh(comm.Dup(), dp=-1, tp=comm.size // 2)
    buckets = Buckets(mesh, {f"b{at}": np.ones(1 << 15) for at in range(4)}, stage=2, bucket_bytes=8)
    mesh.sum(np.ones(1 << 16), axis="dp+tp")  # a shape that is new is agreed on first: see the next test
    step = mesh.raised_together() if where == "buckets of a step" else nullcontext()
    with pytest.raises(KeyboardInterrupt), step:
        interrupted_step(mesh, buckets, where)
    if where == "buckets of a step" or (where == "a sum" and comm.rank >= comm.size // 2):
        with pytest.raises(GridError, match="interrupted may be left: free the mesh"):
            mesh.sum(1.0, axis="dp+tp")
    mesh.free()


def test_a_mesh_is_freed_while_others_agree_on_a_new_sum(comm: Any) -> None:
    """All ranks raise the same error, those that free the mesh, too; then it can be used, and freed."""
    mesh = Mesh(comm.Dup(), dp=-1, tp=comm.size // 2)
    with pytest.raises(ArgumentError, match="called with different arguments: .*: Mesh.sum, dp"):
        mesh.free() if comm.rank < comm.size // 2 else mesh.sum(np.ones(1 << 16), axis="dp+tp")
    assert mesh.sum(1.0, axis="dp+tp") == [comm.size]
    mesh.free()


def test_an_exception_of_another_rank_is_raised_while_a_mesh_is_freed(comm: Any) -> None:
    """The mesh is not freed then, and can be freed later; after that its methods raise GridError."""

    def end(mesh: Any) -> None:
        if comm.rank:
            mesh.free()
        with mesh.raised_together():
            assert 1 / 0

    mesh = Mesh(comm.Dup(), dp=-1)
    with pytest.raises(ZeroDivisionError):
        end(mesh)
    assert mesh.sum(1.0) == [comm.size]
    mesh.free()
    mesh.free()
    with pytest.raises(GridError, match="has been freed"):
        mesh.sum(1.0)


def test_a_request_is_dropped_once(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage fails, and the others wait for it: with a request twice, MPI frees its communicator too early."""

    class Fails:
        def shape(self, microbatch: int) -> tuple[tuple[int, ...], Any]:
            return (3,), float

        def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
            return 1 / 0

    def drop(comms: Any, left: Any) -> None:
        requests.extend(map(id, left))
        dropped(comms, left)

    requests, dropped = list[int](), meshes.drop_messages
    monkeypatch.setattr(meshes, "drop_messages", drop)
    mesh = Mesh(comm.Dup(), pp=-1)
    stage: Any = Fails()
    with pytest.raises(ZeroDivisionError):
        Pipeline(mesh, PipelineSchedule("1f1b", comm.size, 4)).run(stage)
    mesh.free()
    assert len(requests) == len({*requests}) > 0
