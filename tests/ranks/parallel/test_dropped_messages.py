"""What a step that failed has left behind: it meets no other receive, and is gone with the mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import numbers
from tiers import every_grid

pytestmark = pytest.mark.mpi
SIZES = (0, 3, 1 << 20)  # bytes; MPI libraries send large messages when they are received


@every_grid
def test_messages_are_dropped_and_receives_cancelled(comm: Any) -> None:
    """Small and large ones, of all ranks, on two communicators; an array that a cancelled receive has is kept."""
    from mpi4py import MPI

    from pdgemm.errors import GridError
    from pdgemm.instrument.recorder import Then, Traffic
    from pdgemm.schedules.collectives.collective import Collective
    from pdgemm.transport.collectives import prepared_collective
    from pdgemm.transport.dropped_messages import drop_messages

    comms, others = [comm.Dup(), comm.Dup()], [rank for rank in range(comm.size) if rank != comm.rank]
    sent = [np.full(size, comm.rank, np.uint8) for size in SIZES]
    done, never, coming = [True], np.zeros(8, np.uint8), {rank: np.zeros(3, np.uint8) for rank in others}
    for turn in range(2):
        left: list[Any] = [x.Isend(y, rank, turn + at) for x in comms for rank in others for at, y in enumerate(sent)]
        left += [comms[0].Irecv(coming[rank], rank, turn + 1) for rank in others]
        left += [comms[1].Irecv(never, rank, 100) for rank in others] + [MPI.REQUEST_NULL]
        ring = Collective("all_reduce", "ring", tuple(range(comm.size)), (5,) * comm.size, np.dtype("d"))
        x = np.ones(5 * comm.size)
        runs = [prepared_collective(ring, comms[0], x, 200)(Traffic())] if comm.rank != comm.size - 1 else []
        drop_messages(comms, [*left, *(Then(run, done.clear) for run in runs)])
        assert not any(x.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for x in comms)
        assert not any(left) and not never.any()
        assert all((x == rank).all() or not x.any() for rank, x in coming.items())  # it may have come before
        for run in runs:
            with pytest.raises(GridError, match="was given up when its communicator was freed"):
                run.Wait()
        assert done
        for rank in others:
            coming[rank][:] = 0
        comm.Barrier()
    for x in comms:
        x.Free()


@every_grid
@pytest.mark.parametrize("fails", [False, True])
def test_products_on_the_communicator_of_a_mesh(comm: Any, fails: bool) -> None:
    """A call that is not yet received, and what a failed step has left, meet no product and no file."""
    from pdgemm import DistMatrix, ProcessGrid
    from pdgemm.parallel import Buckets, Mesh
    from pdgemm.parallel.layers import Embedding

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


@pytest.mark.on_ranks(1, 2, 4)
@pytest.mark.parametrize("fails", [False, True])
def test_a_mesh_is_freed_while_parameters_are_on_their_way(
    comm: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come, and after a failed step waiting for them is an error; later communicators receive nothing."""
    from mpi4py import MPI

    from pdgemm.errors import GridError
    from pdgemm.parallel import SGD, Buckets, Mesh, ShardedOptimizer

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
