"""Buckets: parameters of a model and their gradients in flat storage, which are reduced bucket by bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import isfinite, prod, sqrt
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.local.arrays.arguments import as_count, as_whole
from pdgemm.local.blas.local_gemm import gemm_accumulate, leading, product_slabs
from pdgemm.parallel.exact_squares import as_float
from pdgemm.parallel.flat_storage import FlatStorage
from pdgemm.parallel.layout_choice import compare_parts, joint_layout, stored
from pdgemm.parallel.line_buckets import LineBuckets
from pdgemm.parallel.line_checks import zero_if_equal
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import Initial, Part, as_part, of_host, type_of_parameters
from pdgemm.schedules.training.flat_layout import FlatLayout, Parameter
from pdgemm.schedules.training.joint_layout import ALL
from pdgemm.schedules.training.parameter_division import Division, extents
from pdgemm.support.agreement import agree, together
from pdgemm.support.text import counted

WAITS = "waits in "  # of the recorder, before the name of a pass: seconds in which that waits for messages
_FAILED = 2.0**20  # what a rank that failed adds to the number of ranks whose gradients overflow
Array = np.ndarray


class Reduced(NamedTuple):
    """What all ranks know of the reduced gradients: their norm, and whether it or one of them is NaN or infinite."""

    norm: float
    overflow: bool


class Buckets:
    """The parameters of a model and their gradients on the ranks of a mesh.  Collective over the mesh.

    ::

        buckets = Buckets(mesh, {"w": w, "b": b}, stage=2)
        with buckets.forward():
            y = x @ buckets.parameters["w"] + buckets.parameters["b"]
        with buckets.backward():
            buckets.gradients["b"] += dy.sum(0); buckets.ready("b")
            buckets.gradients["w"] += x.T @ dy;  buckets.ready("w")
        reduced = buckets.finish()          # ShardedOptimizer.step does this, and updates the parameters

    parameters : arrays of the host by name, in the order of the forward pass, with the same values on all ranks; they
        are copied.  Or `Initial` values by a formula, of which a rank computes what it keeps.  Or a `Part` of one of
        these, which says how it is divided along tp and ep.  Ranks along pp pass the parameters of their own stage;
        where it has several chunks of layers, each with its own passes, a list of mappings, one for each chunk.
    dtype  : float16, bfloat16, float32 or float64, of the parameters; None: that of the arrays.
    stage  : what the ranks divide among them (ZeRO): 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
        parameters, which are whole inside `forward` and `backward` alone, a bucket or two at a time.  Tied parameters
        of two pipeline stages, which do not wait for each other inside passes, are divided as with stage 1 at most.
    microbatches : how often each gradient becomes ready in a step, on every rank.  Gradients are added, and reduced
        when they are ready for the last time.
    reduce_each : with stages 2 and 3, reduce the gradients of each microbatch, which takes memory for none as a whole.
    same_bits : add gradients as a binary tree over all microbatches of all ranks, 2^k of them, and the squares of their
        norm without rounding: then 1, 2, 4, ... ranks along dp, any stages along pp and any `stage` compute the same
        bits, where each microbatch is computed alike.  Tied parameters then have two gradients on one pipeline stage,
        too, which are reduced apart: in each microbatch `gradients[name]` is first that of the end, and then, when
        this is `ready`, that of the beginning.  For the norm 66 numbers are reduced in place of one, for each line.
    bucket_bytes : of gradients that are reduced together; None: the fastest by the model of the machine, from 256 KiB.
        A bucket has parameters of one chunk.

    parameters, gradients : arrays by name, the parts of this rank.  Gradients are float64 where parameters are, else
        float32, and 0 when a step begins.  A gradient is added to, `gradients[name] += ...`, and then `ready(name)`
        starts the reduction of its bucket if it is the last one of it.  Take both anew in each pass: between nodes,
        what other ranks have updated comes in while the next forward pass goes on, and `parameters[name]` waits for it;
        with stages 2 and 3, buckets use the memory of gradients in turn.  With stage 3 a parameter that is taken is a
        copy, valid as long as it is kept.
    lines   : parameters whose gradients are added along one line of the mesh, with a `FlatLayout` and a `FlatStorage`.
    layouts : the `JointLayout` of all lines: words and bytes of each kind.
    layout, storage, line, index : of the only line, where all parameters are on one, as on a mesh along dp alone.

    Cost of a step: `layouts.step()`.  Parts are read in place where all ranks of the line share memory, and sent
    otherwise; then `poll`, which `ready` calls, moves the messages on.
    Raises ArgumentError or DTypeError on all ranks, before anything is allocated.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, Array | Initial | Part] | Sequence[Mapping[str, Array | Initial | Part]],
        *,
        stage: int = 0,
        dtype: Any = None,
        microbatches: int = 1,
        reduce_each: bool = False,
        same_bits: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self.mesh, self.recorder, self.transfers = mesh, mesh.recorder, mesh.transfers
        with together(mesh.comm) as arguments:
            chunks = [parameters] if isinstance(parameters, Mapping) else [*parameters]
            if bad := [type(x).__name__ for x in chunks if not isinstance(x, Mapping)]:
                raise ArgumentError(
                    f"parameters are arrays by name, or a list of such, one a chunk, got one of {bad[0]}"
                )
            named = [(str(name), as_part(x, name), at) for at, own in enumerate(chunks) for name, x in own.items()]
            parts = {name: x for name, x, _ in named}
            kind = type_of_parameters({name: x.values for name, x in parts.items()}, dtype)
            whole = FlatLayout(
                tuple(Parameter(name, x.division.shape, at) for name, x, at in named), kind, 1, stage,
                microbatches=as_count(microbatches, "microbatches", 1), reduce_each=bool(reduce_each),
                tree=bool(same_bits),
            )  # fmt: skip
            bucket_bytes = None if bucket_bytes is None else as_count(bucket_bytes, "bucket_bytes", 1)
            arguments += ["Buckets", kind, f"stage {stage}", f"{whole.microbatches} microbatches", whole.reduce_each]
            arguments += [whole.tree, f"bucket_bytes {bucket_bytes}", counted(len(chunks), "chunk")]
        self._chunks = len(chunks)
        compare_parts(mesh, parts)
        self.layouts, self.lines = stored(mesh, joint_layout(mesh, whole, parts), bucket_bytes)
        self.divisions: dict[str, Division] = {name: part.division for name, part in parts.items()}
        self._line_of = {name: line for line in self.lines for name in line.layout.places}
        windows = {name: x.window(mesh.shape, mesh.rank) for name, x in self.divisions.items()}
        self._empty = {  # parameters of which this rank has no element, and their gradients
            name: tuple(np.zeros(extents(window), x) for x in (kind, whole.wide))
            for name, window in windows.items()
            if name not in self._line_of
        }
        with together(mesh.comm):
            for name, line in self._line_of.items():
                line.set_parameter(name, parts[name].windowed(mesh.shape, mesh.rank))
        self.parameters = _Parameters([*parts], self.parameter)
        self.gradients = _Gradients([*parts], self.gradient)

    @property
    def _only(self) -> LineBuckets:
        if len(self.lines) != 1:
            raise ArgumentError(f"parameters are on {counted(len(self.lines), 'line')} of the mesh, see Buckets.lines")
        return self.lines[0]

    @property
    def layout(self) -> FlatLayout:
        return self._only.layout

    @property
    def storage(self) -> FlatStorage:
        return self._only.storage

    @property
    def line(self) -> ProcessGrid:
        return self._only.line

    @property
    def index(self) -> int:
        return self._only.index

    # ---------------------------------------------------------------- parameters
    def line_of(self, name: str) -> LineBuckets | None:
        """Return the buckets with a parameter; None where no rank of the line has an element of it."""
        return self._line_of.get(name)

    def parameter(self, name: str) -> Array:
        """Return a whole parameter, to be read, after waiting for its bucket; with stage 3 inside passes alone."""
        return self._line_of[name].parameter(name) if name in self._line_of else self._empty[name][0]

    def set_parameter(self, name: str, value: Array | Initial) -> None:
        """Set this rank's part of a parameter, and its master weights, to a value of the shape of the part.  Local.

        All ranks of its line pass the same value.
        """
        value = value if isinstance(value, Initial) else of_host(value, f"parameter {name!r}")
        if value.size != (wanted := prod(extents(self.divisions[name].window(self.mesh.shape, self.mesh.rank)))):
            raise ArgumentError(f"parameter {name!r} has {wanted} elements, got {value.size}")
        if name in self._line_of:
            self._line_of[name].set_parameter(name, value)

    def forward(self, chunk: int | None = None) -> AbstractContextManager[None]:
        """With stage 3, make parameters whole in the order of the forward pass.  Collective over each of the lines.

        chunk : whose parameters the pass uses, the same on all ranks of a pipeline stage; None: of all chunks.

        In a pipeline there is a pass for each microbatch and chunk.  A parameter of another chunk is NaN in it, with a
        warning, and an error of all ranks at the end of the step.
        Raises ArgumentError where there is no such chunk.
        """
        return self._pass(spans.PASSES[0], chunk, -1)

    @contextmanager
    def backward(self, chunk: int | None = None) -> Iterator[None]:
        """With stage 3, make parameters whole in the order of the backward pass, as `forward`.

        After an exception in it gradients are incomplete: call `clear` on all ranks, or `finish` raises ArgumentError.
        """
        try:
            with self._pass(spans.PASSES[1], chunk, 1):
                yield
        except Exception:
            for line in self.lines:
                line.interrupt()
            raise

    @contextmanager
    def _pass(self, phase: str, chunk: int | None, step: int) -> Iterator[None]:
        """Gather the buckets of a chunk in this order until the block ends."""
        try:
            chunk = None if chunk is None else as_whole(chunk, "chunk", 0, self._chunks - 1)
        except ArgumentError as error:  # the other ranks begin the pass, and wait for parameters or gradients
            checks = self.mesh.checks(self.mesh.grid)
            checks.call(checks.passed())
            checks.agree(error)
        with self.timed(phase), ExitStack() as passes:
            for line in self.lines:
                passes.enter_context(line.pass_over(chunk, step))
            yield

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the seconds of a phase of a step, and its span where a trace is recorded."""
        start, trace, seconds = perf_counter(), spans.active(), self.recorder.seconds
        waited = seconds.get("wait", 0.0)
        with self.recorder.phase(phase):
            yield
        if phase in spans.PASSES:
            name = WAITS + phase
            seconds[name] = seconds.get(name, 0.0) + seconds.get("wait", 0.0) - waited
        if trace:
            trace.add((spans.HOST, phase, start, perf_counter()))

    # ---------------------------------------------------------------- gradients
    def gradient(self, name: str) -> Array:
        """Return the gradient of a parameter, to which the gradient of this microbatch is added."""
        return self._line_of[name].gradient(name) if name in self._line_of else self._empty[name][1]

    def ready(self, *names: str) -> None:
        """Say that gradients of a microbatch are complete; the last one of a bucket starts its reduction.  Local.

        What is wrong with them is raised by `finish`, on all ranks.
        """
        for name in names:
            if (line := self._line_of.get(name)) is not None:
                line.ready(name)
            elif name not in self.divisions:
                raise ArgumentError(f"{name!r} is not a parameter; parameters are {', '.join(self.parameters)}")
        if self.transfers.in_flight:
            self.poll()

    def poll(self) -> None:
        """Let the messages of reductions move on, between products of more than a few milliseconds.  Local."""
        self.transfers.poll()

    def multiply(self, A: Array, B: Array, add_to: Array | None = None) -> Array:
        """Return A B, or add it to `add_to`, in parts between which the messages of reductions move on.  Local.

        A : (m, k), B : (k, n), add_to : (m, n), real; they are converted to the type of `add_to`, or of gradients.
        Where messages are sent, `poll` is called every few milliseconds.   2mnk flops.
        Raises ArgumentError on this rank where shapes do not fit.
        """
        shapes = [of_host(x, "a factor").shape for x in (A, B, add_to) if x is not None]
        place = shapes[0][:-1] + shapes[1][1:]
        if shapes[0][1:] != shapes[1][:1] or len(place) != 2 or shapes[2:] not in ([], [place]):
            raise ArgumentError(f"shapes that are no product A B, or not what it is added to: {shapes}")
        C, kind = add_to, self.layouts.whole.wide if add_to is None else add_to.dtype
        if C is None:
            C = np.empty((len(A), B.shape[1]), kind)
        A, B = (_for_blas(np.asarray(x, kind)) for x in (A, B))
        sent = any(line.layout.shards > 1 and not line.layout.in_place for line in self.lines)
        for a, b, c in product_slabs(A, B, C) if sent else [(A, B, C)]:
            gemm_accumulate(1, a, b, add_to is not None, c)
            if sent:
                self.poll()
        return C

    def finish(self, error: Exception | None = None, arguments: str = "") -> Reduced:
        """Wait for all reductions, and return what all ranks know of the gradients.  Collective over the mesh.

        error : what else is wrong on this rank, and is raised on all ranks.   arguments : the same text on all ranks.

        The norm is that of the parameters of all pipeline stages, each counted once, also where several ranks have it.
        The gradients of this rank's parts are `own_gradients` of the storage of each line.
        Raises ArgumentError on all ranks, and names them, where gradients did not become ready, or more often than
        there are microbatches, or where parameters of stage 3 were not used in their order, where ranks along tp have
        different gradients of a parameter that each of them has, and where the ranks have different arguments;
        gradients are 0 then.
        """
        for line in self.lines:
            line.force()
        for line in self.lines:
            line.wait()
        wrong = {name: what for line in self.lines for name, what in line.wrong.items()}
        error = error or next((x.divided.error for x in self.lines if x.divided.error), None)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows here is infinite, and so is the norm
            for line in self.lines:
                line.storage.add_uses()
            own = {x.line: line.storage.squares() for x, line in zip(self.layouts.lines, self.lines)}
            nothing = np.zeros(self.layouts.whole.norm_words)
            squares = [own.get(line, nothing) for line in self.layouts.every]
            bad = not np.isfinite(squares).all()
            squares, failed = [nothing] * len(squares) if bad else squares, _FAILED * bool(wrong or error)
            same = zero_if_equal(crc32(arguments.encode()), self.mesh.rank, self.mesh.shape.size)
            checksum = crc32(repr(self._copies()).encode())
            copies = zero_if_equal(checksum, self.mesh.index("tp"), self.mesh.shape.tp)
            *sums, failures, others, apart = self.mesh.sum(*squares, bad + failed, same, copies, axis=ALL)
        total = self._squared_norm(sums)
        if failures >= _FAILED or others or (apart and not failures):
            gradients = "; ".join(f"the gradient of {name!r} {what}" for name, what in wrong.items())
            times = max((self._line_of[name].layout.times for name in wrong), default=0)
            rule = f"in a step each becomes ready {counted(times, 'time')}, in order of the backward pass"
            error = error or (ArgumentError(f"{gradients}: {rule}") if wrong else None)
            error = error or (self._apart() if apart and not failures else None)
            self.clear()
            agree(self.mesh.comm, error, arguments)
        return Reduced(sqrt(total), failures > 0 or not isfinite(total))

    def _copies(self) -> dict[str, int]:
        """Return checksums of what this rank updates of the gradients that each rank along tp has.  Local."""
        lines = [line for x, line in zip(self.layouts.lines, self.lines) if x.line.copies > 1]
        return {name: line.storage.checksum(name) for line in lines for name in line.layout.places}

    def _apart(self) -> ArgumentError | None:
        """Return an error that names what ranks along tp have different gradients of.  Collective over the mesh."""
        line, of_all = self.mesh.shape.line("tp", self.mesh.rank), self.mesh.comm.allgather(self._copies())
        of_ranks = [of_all[rank] for rank in line]
        names = [name for name in of_ranks[0] if len({own[name] for own in of_ranks}) > 1]
        if not names:
            return None
        return ArgumentError(
            f"the ranks along tp have different gradients of {', '.join(map(repr, names))}, and update copies of it by "
            'them: where a gradient is an addend, pass Part(x, tp="sum"); where it is whole, but rounded otherwise, '
            f"pass this as well, and divide it by {self.mesh.shape.tp}"
        )

    def _squared_norm(self, sums: Sequence[Array]) -> float:
        """Return the squared norm of all gradients from the sums over all ranks of each line's squares.  Local.

        Exact sums are rounded when they are whole, since stages and ends change the lines but no copies.
        """
        whole, exact = defaultdict[int, Any](float), self.layouts.whole.tree
        for x, line in zip(sums, self.layouts.every):
            whole[line.copies] += x
        return sum((as_float(x) if exact else float(x[0])) / copies for copies, x in sorted(whole.items()))

    def clear(self) -> None:
        """Set gradients to zero for the next step, after completing the reductions of this one.  Collective.

        After an exception that all ranks have raised it makes the buckets fit for the next step.
        """
        for line in self.lines:
            line.force()  # an exception may have left other ranks waiting for reductions that this one has not begun
        for line in self.lines:
            line.clear()
        self.mesh.checks(self.mesh.grid).passed(1)  # who fails next calls nobody who is still here


def _for_blas(x: Array) -> Array:
    """Return an array of which rows or columns are contiguous."""
    try:
        leading(x)
    except ValueError:
        return np.ascontiguousarray(x)
    return x


class _Parameters(Mapping[str, Array]):
    """Arrays by the names of parameters."""

    def __init__(self, names: Sequence[str], of: Callable[[str], Array]) -> None:
        self._names, self._of = names, of

    def __getitem__(self, name: str) -> Array:
        return self._of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Gradients(_Parameters):
    def __setitem__(self, name: str, value: Array) -> None:
        """Take the array that `x[name] += y` has changed in place."""
        if value is not (own := self[name]) and not np.shares_memory(value, own):
            own[...] = of_host(value, f"the gradient of {name!r}")
