"""einsum_files(): a contraction of tensors from datasets to a dataset, as `pdgemm einsum` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.observer import Observer
from pdgemm.io import hdf5
from pdgemm.io.source import Source, source
from pdgemm.io.streamed.before_reading import check_memory, check_result_file
from pdgemm.io.tensor_source import read_tensor
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.planning.machines.machine import machine_at_hand, on_nodes
from pdgemm.planning.tensors.einsum_plan import EinsumPlan, plan_of
from pdgemm.planning.tensors.expression import Expression, parsed
from pdgemm.planning.tensors.resources import Resources, TensorValue
from pdgemm.planning.tensors.tensor_layouts import default_layout
from pdgemm.support.agreement import together
from pdgemm.support.text import in_bytes, in_words
from pdgemm.tensors.dist_tensor import DistTensor
from pdgemm.tensors.einsum import einsum
from pdgemm.tensors.einsum_residual import image_size, verify_einsum


def einsum_files(
    grid: ProcessGrid,
    say: Observer,
    expression: str,
    operands: Sequence[tuple[str, str]],
    output: tuple[str, str] | None,
    *,
    alpha: complex,
    dtype: str | None,
    memory: int | None,
    verified: bool,
    seed: int,
    force: bool,
    compression: str | None,
) -> int:
    """Plan and carry out a contraction, and write its result; return whether the result was not wrong.  Collective.

    operands, output : files and names of datasets, "" of a .npy file; no output for a result without axes.
    memory : bytes per rank for operands, result and buffers.   seed : for `verify_einsum`.
    Raises the errors of `einsum` and `hdf5.load`, before elements are read where these do not decide.
    """
    sources = [source(grid, f"operand {at}", x, dtype, tensor=True) for at, x in enumerate(operands, 1)]
    with together(grid.comm) as arguments:
        expr, _ = parsed(expression, sources, _dims)
        shape = tuple(expr.extent[x] for x in expr.output)
        if bool(shape) != (output is not None):
            which = "is a number, and no dataset: leave out -o" if output else f"has the shape {shape}: name it by -o"
            raise ArgumentError(f"the result of einsum {expr} {which}")
        stored = sources[0].dtype
        for x in sources[1:]:
            stored = dtypes.product(stored, x.dtype)
        alpha = as_scalar(alpha, stored, "alpha")
        plan, bytes_of_operands = _planned(grid, expr, sources, memory)
        arguments += [str(plan)]
    nbytes = prod(shape) * stored.itemsize
    if output is not None:
        check_result_file(grid, output, nbytes, force, sources)
    needed = bytes_of_operands + plan.extra_bytes + 8 * verified * image_size(expr)
    advice = ", or limit it by --memory" if memory is None else ", or less --memory"
    check_memory(grid, needed, "the operands, the result and the buffers", advice)
    figures = {"words": plan.words, "bound": plan.bound, "extra_bytes": plan.extra_bytes, "seconds": plan.seconds}
    layouts = [str(x) for x in plan.layouts]
    say.note("plan", [str(plan)], {**figures, "slices": plan.slices, "layouts": layouts, "expression": str(expr)})
    tensors = _read(grid, say, sources, plan)
    with say.progress("einsum"):
        C = einsum(expression, *tensors, alpha=alpha, optimize=plan, memory_limit=memory and memory - bytes_of_operands)
    _report(say, C, plan)
    if verified:
        with say.progress("verify"):
            residual = verify_einsum(expr, tensors, C, alpha, seed)
        say.report("verify", residual)
        if residual.wrong:
            return False
    if output is not None:
        with say.progress("write", nbytes, "B/s") as progress:
            how: Any = {"compression": compression, "overwrite": force, "grid": grid, "progress": progress}
            wrote = hdf5.save(*output, C, **how)
        say.report("wrote", wrote)
    return True


def _dims(x: Source) -> tuple[int, ...]:
    """Return the shape of the array in its file."""
    extents = x.stored.extents[: x.stored.ndim]
    return extents[::-1] if x.by_columns else extents


def _planned(
    grid: ProcessGrid, expr: Expression, sources: Sequence[Source], memory: int | None
) -> tuple[EinsumPlan, int]:
    """Return the plan, which chooses the layouts of the operands, and the bytes of the operands on a rank.  Local.

    memory : bytes per rank for operands, result and buffers.   Raises MemoryLimitError.
    """
    layouts = [default_layout(_dims(x), len(grid.members), None, grid.members) for x in sources]
    values = tuple(TensorValue(layout, x.dtype, free=True) for layout, x in zip(layouts, sources))
    machine, limit = on_nodes(machine_at_hand(), grid.ranks_per_node), memory
    while True:
        plan = plan_of(expr, values, Resources(grid.size, machine, limit, grid.members))
        different = {(x.stored.object, y) for x, y in zip(sources, plan.operands)}
        held = sum(y.layout.of(y.dtype).local_bytes(None) for _, y in different)
        if limit is None or memory is None or held + plan.extra_bytes <= memory:
            return plan, held
        limit -= held + plan.extra_bytes - memory
        if limit < 0:
            need = f"the operands of {expr} need {in_bytes(held)}"
            raise MemoryLimitError(f"--memory {in_bytes(memory)} per rank is too little: {need}")


def _read(grid: ProcessGrid, say: Observer, sources: Sequence[Source], plan: EinsumPlan) -> list[DistTensor]:
    """Read the operands in the layouts of the plan, each dataset in one layout once."""
    known = dict[Any, DistTensor]()
    for x, value in zip(sources, plan.operands):
        if (key := (x.stored.object, value)) not in known:
            with say.progress(f"read {x.what}", x.nbytes, "B/s") as progress:
                known[key] = read_tensor(x, grid, layout=value.layout, progress=progress)
            say.report("read", known[key].report)
    return [known[x.stored.object, value] for x, value in zip(sources, plan.operands)]


def _report(say: Observer, C: Any, plan: EinsumPlan) -> None:
    """Report the words that the busiest rank has received, beside the plan and the bound; a number itself."""
    if not isinstance(C, DistTensor):
        if np.ndim(C) == 0:
            value = complex(C) if np.iscomplexobj(C) else float(C)
            say.note("value", [f"{plan.expression} = {value:.15g}"], str(value) if np.iscomplexobj(C) else value)
        return
    say.report("einsum", C.report)
    words = C.grid.comm.allreduce(C.report.counted.words_received, MPI.MAX)
    planned = "as planned" if words == plan.words else f"planned {in_words(plan.words)}"
    text = f"the busiest rank received {in_words(words)}, {planned}; bound {in_words(plan.bound)}"
    say.note("words", [text], {"counted": words, "planned": plan.words, "bound": plan.bound})
