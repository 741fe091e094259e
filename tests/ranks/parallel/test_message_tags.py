"""Message tags of a mesh: those of other steps after a failure, and never more than MPI has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdgemm.errors import GridError
from pdgemm.parallel import Buckets, Mesh, Pipeline, PipelineSchedule, line_checks, pipeline_stages
from pdgemm.parallel import mesh as of_mesh
from pdgemm.parallel.line_checks import LineChecks
from pdgemm.transport.collectives import byte_requests

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(2, 3)]
LAST, LARGE = 32767, 5000  # what MPI promises (MPI 4.1, section 9.1.2); tags of a step


class Numbers:
    """Layers that return the number of the microbatch, which has to come in."""

    def shape(self, microbatch: int) -> tuple[tuple[int], Any]:
        return (1,), np.float64

    def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
        assert x is None or x == microbatch
        return np.full(1, float(microbatch))

    backward = forward

    def weights(self, microbatch: int, chunk: int) -> None: ...


@pytest.fixture
def mesh(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mesh of pipeline stages, of an MPI that has no more tags than it must."""
    for module in (of_mesh, line_checks):
        monkeypatch.setattr(module, "last_tag", lambda: LAST)
    return Mesh(comm.Dup(), pp=-1)


def pipeline(mesh: Any, microbatches: int) -> Any:
    return Pipeline(mesh, PipelineSchedule("1f1b", mesh.shape.pp, microbatches))


def test_tags_are_bounded(comm: Any, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pipelines have the tags of one, each failure takes as many more, and then all ranks refuse to go on.

    A failure before a pipeline begins on one rank leaves messages of the others, and all ranks have the same tags then.
    """

    def recording(start: Any, data: Any, rank: int, tag: int) -> list[Any]:
        tags.append(tag)
        return byte_requests(start, data, rank, tag)

    def without_data(failing: int) -> None:
        if comm.rank == failing:
            raise ValueError("no data")
        small.run(Numbers())

    monkeypatch.setattr(pipeline_stages, "byte_requests", recording)
    tags, before, p = list[int](), set[int](), comm.size
    small, *_, large = (pipeline(mesh, x) for x in (3, *range(4, 20), LARGE // (2 * p)))
    step = 2 * p * (LARGE // (2 * p))
    failures = (LAST - 15000 - 6) // step - 1  # in all
    for failing in range(failures):
        small.run(Numbers())
        pipeline(mesh, 5).run(Numbers())
        sums = mesh.all_reduce(np.arange(9), axis="pp"), mesh.sum(1.0, axis="pp")
        assert np.array_equal(sums[0], p * np.arange(9)) and sums[1] == [p]
        assert not before & {*tags} and len(tags) >= 6 * (p > 1) and all(5 < x < LAST - 15000 for x in tags)
        with pytest.raises(ValueError, match="no data"), mesh.raised_together():
            without_data(failing % p)
        before, tags = before | {*tags}, []
    small.run(Numbers())
    with pytest.raises(ValueError, match="once more"), mesh.raised_together():
        raise ValueError("once more")
    needed = (
        rf"largest message tag is {LAST}, and a mesh needs {15000 + 6 + step * (failures + 2)}: 6 for buckets, 15000 .*"
    )
    refused = [
        lambda: large.run(Numbers()), lambda: small.run(Numbers()), lambda: pipeline(mesh, 3),
        lambda: Buckets(mesh, {"w": np.ones(7)}),
    ]  # fmt: skip
    tags = []
    for at, call in enumerate(refused):
        with pytest.raises(GridError, match=needed if not at else "free the mesh, and make another one") as raised:
            call()
        assert len({*comm.allgather(str(raised.value))}) == 1
    assert not tags and mesh.sum(1.0, axis="pp") == [p]
    mesh.free()


def test_a_pipeline_of_too_many_microbatches(comm: Any, mesh: Any) -> None:
    """It is refused before anything is sent, and smaller ones are as they were; so are buckets beside it."""
    small, most = pipeline(mesh, 3), (LAST - 15000 - 6) // (2 * comm.size)
    pipeline(mesh, most)
    with pytest.raises(GridError, match=rf"{2 * comm.size * (most + 1)} for a step of a pipeline"):
        pipeline(mesh, most + 1)
    with pytest.raises(GridError, match=r": \d+ for buckets"):
        Buckets(mesh, {f"w{at}": np.ones(7) for at in range(20)}, bucket_bytes=8)
    small.run(Numbers())
    mesh.free()


def test_tags_of_sums_after_failures(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others after each failure, above those of pipelines, and below the last one, which `drop_messages` has alone."""
    checks, before = mesh.checks(mesh.grid), set[int]()
    for failures in (0, 1, 2, 2499, 2500):
        monkeypatch.setattr(LineChecks, "failures", property(lambda _, number=failures: number))
        tags = {checks.tag(x) for x in range(6)}
        assert tags == {*range(6)} if not failures else all(LAST - 15000 <= x < LAST for x in tags)
        assert len(tags) == 6 and not before & tags
        before |= tags
    monkeypatch.undo()
    mesh.free()
