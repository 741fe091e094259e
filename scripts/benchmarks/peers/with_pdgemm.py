"""pdgemm: all grids, and the layouts in which its algorithms need no redistribution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.errors import ArgumentError
from pdgemm.grids.layout import Layout
from pdgemm.local.blas import processors
from pdgemm.local.blas.threads import blas_of_products, multiplier
from pdgemm.matrix.local_arrays import all_shared, new_array
from pdgemm.names import AlgorithmName, AnyName
from pdgemm.planning.algorithm_registry import families
from pdgemm.planning.search.candidates import Arrangement as Laid
from peers.worker import Block, Maker, Setting, Way, boxes, product, randomize

Layouts = tuple[Layout, ...]


def kernel() -> str:
    return processors.kernel(blas_of_products())


def makers(setting: Setting) -> Iterator[Maker]:
    grids: dict[object, ProcessGrid] = {}
    algorithm = AnyName("auto" if setting.variant in ("-", "mkl") else setting.variant)
    shapes = [(1, setting.comm.size)] if setting.layout == "columns" else boxes(setting.comm.size)
    given = [on_grid(setting, grids, shape) for shape in shapes]
    plan(*map(partial(empty, setting, grids), given[0]), algorithm=algorithm)  # raises if it is impossible
    tried: dict[Layouts, None] = dict.fromkeys(given)
    if setting.layout == "native" and setting.block is None:
        for kind in map(AnyName, families() if algorithm == "auto" else [algorithm]):
            for layouts in given:
                try:
                    p = plan(*map(partial(empty, setting, grids), layouts), algorithm=kind)
                except ArgumentError:  # it cannot run on this number of ranks
                    continue
                tried.setdefault(Laid(p.product, p.transposed).layouts)
    for layouts in tried:
        yield partial(make, setting, grids, layouts, algorithm)


def on_grid(setting: Setting, grids: dict[object, ProcessGrid], shape: tuple[int, ...]) -> Layouts:
    """Return the layouts of A, B and C on one grid."""
    m, n, k = setting.mnk
    pr, pc = shape
    grid = ProcessGrid(setting.comm, (pr, pc))
    block = None if setting.layout == "columns" else setting.block
    matrices = [
        DistMatrix.empty(extents, grid=grid, block=block, dtype=setting.dtype, order=setting.order)  # type: ignore[arg-type]
        for extents in ((m, k), (k, n), (m, n))
    ]
    layouts = tuple(matrix.layout_in(grid) for matrix in matrices)
    grids.setdefault(layouts[0].grid, grid)
    return layouts


def empty(setting: Setting, grids: dict[object, ProcessGrid], layout: Layout) -> DistMatrix:
    """Return a matrix with a layout, in the memory order of `setting`."""
    if layout.grid not in grids:
        grids[layout.grid] = ProcessGrid(setting.comm, layout.distribution.grid_shape, ranks=layout.rank_map)
    grid, order = grids[layout.grid], setting.order
    local = new_array(layout.local_shape(setting.comm.rank), setting.dtype, order, grid)  # type: ignore[arg-type]
    shared = all_shared(local, grid)
    return DistMatrix(local, grid, layout.distribution, order, shared=shared)  # type: ignore[arg-type]


def make(setting: Setting, grids: dict[object, ProcessGrid], layouts: Layouts, algorithm: AlgorithmName) -> Way:
    A, B, C = (empty(setting, grids, layout) for layout in layouts)
    for seed, matrix in enumerate((A, B), 1):
        randomize(block(matrix), seed)
    p = plan(A, B, C, algorithm=algorithm)
    pr, pc, layers = p.shape
    lie = [" x ".join(map(str, x.grid.shape)) for x in (A, B, C)]
    note = f"{p.algorithm} on {pr} x {pc}" + (f" x {layers}" if layers > 1 else "") + f", {multiplier()}"
    if setting.layout == "native" and any(x.grid.shape != (pr, pc) for x in (A, B, C)):
        note += f", A on {lie[0]}, B on {lie[1]}, C on {lie[2]}"
    return product(
        setting,
        note,
        lambda: pdgemm(1.0, A, B, 0.0, C, algorithm=algorithm),
        lambda: (block(A), block(B), block(C)),
    )


def block(matrix: DistMatrix) -> Block:
    return Block(*matrix.indices(), matrix.local)
