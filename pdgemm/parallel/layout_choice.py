"""The layouts of a model's parameters on lines of a mesh: transport and the size of buckets are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, TypeVar

import numpy as np

from pdgemm.errors import ArgumentError, NodeMemoryError, PdgemmError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix.local_arrays import allocated
from pdgemm.parallel.flat_storage import flat_arrays
from pdgemm.parallel.line_buckets import LineBuckets
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import Initial, Part
from pdgemm.planning.collective_plan import choose_collective
from pdgemm.planning.machines.machine import machine_at_hand, on_nodes
from pdgemm.planning.machines.simulator import simulate
from pdgemm.schedules.collectives.collective import even_parts
from pdgemm.schedules.mover_registry import SHARED
from pdgemm.schedules.training.flat_layout import Bucket, FlatLayout, Parameter
from pdgemm.schedules.training.joint_layout import ALL, JointLayout, LineLayout
from pdgemm.schedules.training.mesh_shape import ENDS
from pdgemm.schedules.training.parameter_division import Line, extents
from pdgemm.support.agreement import agree, described_elements, together

STAGE = "dp+cp+tp"  # the line of the ranks that have the layers of one pipeline stage
_LEAST = 1 << 18  # bytes of the smallest bucket that is chosen


T = TypeVar("T")


def on_all_lines(mesh: Mesh, lines: Iterable[Any], collective: Callable[[Any], T]) -> list[T]:
    """Return what a function returns that is collective over each of these lines in turn.  Collective over the mesh.

    An error on one line is raised on all ranks of the mesh, after those of other lines have called the function, too.
    """
    results, error = list[T](), None
    for line in lines:
        try:
            results.append(collective(line))
        except PdgemmError as bad:
            error = error or bad
    agree(mesh.comm, error)
    return results


def compare_parts(mesh: Mesh, parts: Mapping[str, Part]) -> None:
    """Raise ArgumentError on all ranks where those of a pipeline stage pass different parts, or the ends tied ones."""

    def compare(axis: str) -> None:
        here = {name: x for name, x in parts.items() if x.division.tied or axis == STAGE}
        values = [x.values for x in here.values()]
        with together(mesh.line(axis).comm) as arguments:
            if axis == ENDS and here and (stage := mesh.index("pp")) not in (0, mesh.shape.pp - 1):
                raise ArgumentError(f"{next(iter(here))!r} is tied, and stage {stage} is not the first or the last")
            arguments += ["Buckets", *(f"name={name!r} {x.division}" for name, x in here.items())]
            arguments += [x for x in values if isinstance(x, Initial)]
            arguments.append(described_elements(*(x for x in values if isinstance(x, np.ndarray))))

    on_all_lines(mesh, (STAGE, ENDS), compare)


def joint_layout(mesh: Mesh, whole: FlatLayout, parts: Mapping[str, Part]) -> JointLayout:
    """Return the layouts of the lines of this rank's parts, without transport.  Collective over the mesh.

    whole : the layout of the whole parameters on one rank.
    """
    own = dict[Line, list[Parameter]]()
    for x, part in zip(whole.parameters, parts.values()):
        line, window = part.division.line(mesh.shape, whole.tree), extents(part.division.window(mesh.shape, mesh.rank))
        chunk = 0 if ENDS in line.axis else x.chunk  # the ends have tied parameters in different chunks
        own.setdefault(line, []).append(Parameter(x.name, window, chunk))
    own = {line: entries for line, entries in own.items() if sum(x.words for x in entries)}
    lines = {line for some in mesh.comm.allgather([*own]) for line in some}
    every = tuple(sorted(lines, key=lambda line: (ENDS not in line.axis, line)))
    if whole.tree:
        for axis in (axis for line in every for axis in line.axis.split("+")):
            if axis != ENDS and (n := mesh.shape.length(axis)) & (n - 1):
                raise ArgumentError(f"same_bits takes 1, 2, 4, ... ranks along {axis}, got {n}")
    layouts = list[LineLayout]()
    for line in every:
        size, index = mesh.length(line.axis), mesh.index(line.axis)
        if line in own:
            tied = {"stage": min(whole.stage, 1), "reduce_each": False, "uses": 1 + (mesh.shape.pp == 1)}
            tied = tied if ENDS in line.axis else {}
            layout = replace(whole, parameters=tuple(own[line]), shards=size, **tied)  # type: ignore[arg-type]
            layouts.append(LineLayout(line, layout, index))
    return JointLayout(tuple(layouts), every, whole, mesh.shape.size, mesh.index(ALL))


def stored(mesh: Mesh, joint: JointLayout, bucket_bytes: int | None) -> tuple[JointLayout, tuple[LineBuckets, ...]]:
    """Return the layouts with transport, and the buckets of each line with their memory.  Collective over the mesh.

    Where the memory of a node lacks on any rank, all ranks of the mesh send parts instead of reading them in place.
    Raises OutOfMemoryError on all ranks.
    """
    grids = {line: mesh.line(line.axis) for line in joint.every}

    def transport(in_place: bool) -> JointLayout:
        def choose(x: LineLayout) -> LineLayout:
            return x._replace(layout=with_transport(x.layout, grids[x.line], bucket_bytes, in_place))

        return replace(joint, lines=tuple(on_all_lines(mesh, joint.lines, choose)))

    def allocate() -> list[dict[str, np.ndarray]]:
        with together(mesh.comm):
            return [flat_arrays(x.layout, grids[x.line]) for x in layouts.lines]

    layouts = transport(in_place=True)
    try:
        arrays = allocated(mesh.comm, allocate)
    except NodeMemoryError:  # raised on all ranks
        layouts = transport(in_place=False)
        arrays = allocated(mesh.comm, allocate)
    with (agreed := together(mesh.comm)):
        agreed.flag = max((x.layout.uses * len(x.layout.buckets) for x in layouts.lines), default=0)
    number = 2 * agreed.flag  # tags are the same on all ranks of a line, which have more or fewer buckets on others
    tags = {line: mesh.tags(number) for line in joint.every}
    buckets = [LineBuckets(mesh, grids[x.line], x.layout, own, tags[x.line]) for x, own in zip(layouts.lines, arrays)]
    return layouts, tuple(buckets)


def with_transport(layout: FlatLayout, line: ProcessGrid, bucket_bytes: int | None, in_place: bool) -> FlatLayout:
    """Return the layout with its collectives and the size of its buckets.  Collective over the line.

    Lines of a mesh may lie on one node or on several, and then have other collectives.
    bucket_bytes : of gradients; None: the size with the least time by the model of the machine.
    in_place : parts are read in place if all ranks of the line share memory.
    """
    with together(line.comm) as arguments:
        chosen = _with_transport(layout, line, bucket_bytes, in_place)
        arguments += ["Buckets", chosen]
    return chosen


def _with_transport(layout: FlatLayout, line: ProcessGrid, bucket_bytes: int | None, in_place: bool) -> FlatLayout:
    """Return the layout, as `with_transport`.  Local."""
    machine = on_nodes(machine_at_hand(), line.ranks_per_node)
    ranks, operation = layout.shards, "reduce_scatter" if layout.stage else "all_reduce"
    node = line.nodes if line.ranks_per_node else ()

    def fastest(operation: str) -> str:
        counts = even_parts(layout.words, ranks)
        return choose_collective(operation, counts, layout.wide, ranks, machine, node).algorithm

    if in_place and line.shares_memory and line.ranks_per_node is None:
        how = {"mover": SHARED.name, "reduce_by": "pairwise", "gather_by": "pairwise"}
    elif ranks > 1:
        late = layout.stage in (1, 2) and len({*line.nodes}) == ranks  # parameters come in during the next pass
        how = {"gather_by": "pairwise" if late else fastest("all_gather")}
        how["reduce_by"] = "nearest" if layout.tree else fastest(operation)
    else:
        how = {}
    layout = replace(layout, node=node, **how)  # type: ignore[arg-type]
    if bucket_bytes is None:
        return replace(layout, bucket_words=bucket_words(layout, machine))
    return replace(layout, bucket_words=max(1, bucket_bytes // layout.wide.itemsize))


def bucket_words(layout: FlatLayout, machine: Any) -> int:
    """Return the words of a bucket with the least exposed time: sqrt(A N / B).  Local.

    A collective without words takes A seconds, which each bucket costs; a word takes B seconds, and those of the last
    bucket are not hidden.  N : the words of all parameters.
    """
    if layout.shards == 1:
        return layout.words
    one = Bucket(0, 0, layout.shards, ())
    first, whole = (
        simulate(layout.reduction(bucket), machine, layout.shards).seconds
        for bucket in (one, Bucket(0, 0, layout.words, ()))
    )
    word = max(whole - first, 1e-15) / layout.words
    least = min(layout.words, _LEAST // layout.wide.itemsize)
    return max(least, min(layout.words, int(sqrt(first * layout.words / word))))
