"""Homes: where matrices that ranks update in parts come together, each whole on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.buckets import Buckets
from pdgemm.parallel.layout_choice import STAGE
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import as_table
from pdgemm.parallel.updates.muon import Muon
from pdgemm.schedules.training.home_exchange import HeldPart, HomeExchange, HomeLoads
from pdgemm.schedules.training.parameter_division import Division
from pdgemm.support.agreement import together
from pdgemm.transport.collectives import all_to_all

Choice = Callable[[str], bool] | Collection[str] | None
Array = np.ndarray
_TAG = 0  # the message tag of collectives that begin and end in the same order on all ranks of a line


class Homes:
    """The homes of the matrices of a pipeline stage, and their exchange.  Collective over the stage.

    names : of the parameters of this stage that `rule` updates, the same on all its ranks.

    exchange : the `HomeExchange`, whose ranks are those of the stage.   names : those that have elements, in its order.
    loads    : the `HomeLoads`: what ranks update, receive and allocate.
    """

    def __init__(self, buckets: Buckets, rule: Muon, names: Iterable[str]) -> None:
        self._buckets, self.rule, self._line = buckets, rule, buckets.mesh.line(STAGE)
        self._kind = buckets.layouts.whole.wide
        shapes = {name: buckets.divisions[name].shape for name in names}
        self._shapes = {name: shape for name, shape in shapes.items() if prod(shape)}
        self.names = (*self._shapes,)
        of_ranks = self._line.comm.allgather([self._held(name) for name in self.names])
        held, tables = tuple(zip(*of_ranks)), tuple(map(as_table, self._shapes.values()))
        own = np.array([[x.words for x in parts] for parts in held], np.int64).reshape(-1, self._line.size)
        self.loads = HomeLoads(tables, own, np.arange(len(tables)), self._kind)
        self.exchange = HomeExchange(self._line.size, tuple(map(int, self.loads.homes)), held, self._kind)
        self._buffers, self._stacks, self._wholes = dict[str, Array](), list[Array](), dict[int, Array]()

    def _held(self, name: str) -> HeldPart:
        """Return what this rank updates of a matrix.  Local."""
        buckets, mesh = self._buckets, self._buckets.mesh
        division, line, elements = buckets.divisions[name], buckets.line_of(name), slice(0, 0)
        if line is not None:
            elements, _ = line.layout.overlap(name, line.storage.span(line.layout.bucket_of[name]))
        window = tuple((x.start, x.stop) for x in division.window(mesh.shape, mesh.rank))
        lowest = min(mesh.shape.line(division.line(mesh.shape, buckets.layouts.whole.tree).axis, mesh.rank))
        return HeldPart(window, elements.start, elements.stop, lowest)

    def traffic(self) -> Traffic:
        """Return the traffic of this rank in a step: `HomeExchange.traffic`."""
        return self.exchange.traffic(self._line.rank) if self.names else Traffic()

    def allocate(self) -> None:
        """Allocate the buffers of `HomeLoads.buffers`, in which every update is computed.  Local."""
        sizes, self._stacks, self._wholes = self.loads.buffers, [], {}
        self._buffers = {name: np.empty(words[self._line.rank], self._kind) for name, words in sizes.items()}
        stacked, start = defaultdict[tuple[int, int], list[int]](list), 0
        for at in np.flatnonzero(self.loads.homes == self._line.rank).tolist():
            rows, columns = self.loads.shapes[at]
            stacked[min(rows, columns), max(rows, columns)].append(at)
        shapes = [*self._shapes.values()]
        for (m, n), numbers in stacked.items():  # those of equal shapes, or of the transposed one
            stop = start + len(numbers) * m * n
            self._stacks.append(self._buffers["matrices"][start:stop].reshape(-1, m, n))
            for at, x in zip(numbers, self._stacks[-1]):
                rows, *others = shapes[at]
                tall = self.loads.shapes[at] == (n, m) and m < n
                self._wholes[at] = np.moveaxis(x.reshape(*others, rows), -1, 0) if tall else x.reshape(shapes[at])
            start = stop

    @property
    def bytes(self) -> int:
        """The bytes of the buffers of this rank: `HomeLoads.bytes`."""
        return sum(x.nbytes for x in self._buffers.values())

    def update(self, parts: Sequence[Array]) -> None:
        """Overwrite what this rank updates of each matrix, flat, by its part of `Muon.whole_updates`.

        After an exception the next update has new buffers: messages may still come into the old ones.
        """
        if not self.names:
            return
        if not self._buffers:
            self.allocate()
        try:
            self._update(parts)
        except BaseException:
            self._buffers, self._stacks, self._wholes = {}, [], {}
            raise

    def _update(self, parts: Sequence[Array]) -> None:
        for (at, _), place in self._leaving(back=False).items():
            place[...] = parts[at]
        self._gather(self._exchanged(back=False))
        for stack in self._stacks:
            self.rule.whole_updates(stack, self._buffers["work"])
        self._scatter(self._leaving(back=True))
        for (at, _), x in self._exchanged(back=True).items():
            parts[at][...] = x

    def _leaving(self, back: bool) -> dict[tuple[int, int], Array]:
        """Return the places of the parts that this rank sends, by the number of the matrix and the target."""
        routes, start, places = self.exchange.routes(back), 0, dict[tuple[int, int], Array]()
        for to in range(self._line.size):
            for at in routes.get((self._line.rank, to), ()):
                stop = start + self.exchange.held[at][to if back else self._line.rank].words
                places[at, to] = self._buffers["sent"][start:stop]
                start = stop
        return places

    def _exchanged(self, back: bool) -> dict[tuple[int, int], Array]:
        """Send what is in the places that leave, and return what comes, by the number of the matrix and the source."""
        exchange, line, mesh, me = self.exchange, self._line, self._buckets.mesh, self._line.rank
        routes, collective = exchange.routes(back), exchange.exchange(back)
        counts = np.reshape(collective.counts, (line.size, line.size))
        sent, arrived = (
            np.split(self._buffers[name][: sum(words)], np.cumsum(words)[:-1])
            for name, words in (("sent", counts[me]), ("arrived", counts[:, me]))
        )
        all_to_all(
            collective,
            mesh.checks(line).messages,
            sent,
            mesh.traffic["homes"],
            lambda group: mesh.wait(group, line),
            mesh.checks(line).tag(_TAG),
            arrived,
        )
        pieces = dict[tuple[int, int], Array]()
        for source, flat in enumerate(arrived):
            numbers = routes.get((source, me), [])
            words = [exchange.held[at][me if back else source].words for at in numbers]
            for at, x in zip(numbers, np.split(flat, np.cumsum(words)[:-1])):
                pieces[at, source] = x
        return pieces

    def _windows(self, at: int, ranks: Iterable[int]) -> dict[Any, list[int]]:
        """Return the ranks that have each window of a matrix, in the order of their elements."""
        held, windows = self.exchange.held[at], defaultdict[Any, list[int]](list)
        for rank in sorted(ranks, key=lambda x: held[x].start):
            windows[held[rank].window].append(rank)
        return windows

    def _gather(self, pieces: dict[tuple[int, int], Array]) -> None:
        """Write the parts that came into the matrices of which this rank is the home; what was sent is overwritten."""
        for at, whole in self._wholes.items():
            held = self.exchange.held[at]
            for ranks in self._windows(at, self.exchange.sources[at]).values():
                part = held[ranks[0]]
                flat = self._buffers["sent"][: prod(part.shape)]
                np.concatenate([pieces[at, x] for x in ranks], out=flat)
                whole[part.place] = flat.reshape(part.shape)

    def _scatter(self, places: dict[tuple[int, int], Array]) -> None:
        """Write the parts of the matrices of which this rank is the home to their places; what came is overwritten."""
        for at, whole in self._wholes.items():
            held = self.exchange.held[at]
            for ranks in self._windows(at, (x for x in range(self._line.size) if held[x].words)).values():
                part = held[ranks[0]]
                flat = self._buffers["arrived"][: prod(part.shape)]
                flat.reshape(part.shape)[...] = whole[part.place]
                for rank in ranks:
                    places[at, rank][...] = flat[held[rank].start : held[rank].stop]


def chosen_matrices(mesh: Mesh, divisions: dict[str, Division], choice: Choice) -> dict[str, bool]:
    """Return for each parameter of all pipeline stages: is it updated as a matrix?  Collective over the mesh.

    choice : names, or a function of the name of a parameter of two or more dimensions; None: see `_is_matrix`.

    Raises ArgumentError on all ranks where a name is not that of a parameter of two or more dimensions, where a matrix
    is tied, and where ranks choose differently.
    """
    model = {name: x for some in mesh.comm.allgather(divisions) for name, x in some.items()}
    with together(mesh.comm) as arguments:
        if isinstance(choice, str) or not (choice is None or callable(choice) or isinstance(choice, Collection)):
            raise ArgumentError(f"matrices are names, a function of a name or None, got {choice!r}")
        tables = [name for name, x in model.items() if len(x.shape) > 1]
        if choice is None:
            chosen = {name for name in tables if _is_matrix(model[name])}
        else:
            chosen = {name for name in tables if choice(name)} if callable(choice) else {*choice}
        if unknown := sorted(map(str, chosen - {*tables})):
            raise ArgumentError(
                f"matrices has {unknown[0]!r}, and parameters of two or more dimensions are {', '.join(tables)}"
            )
        if tied := [name for name in tables if name in chosen and model[name].tied]:
            raise ArgumentError(f"{tied[0]!r} is tied, on two pipeline stages: leave it to the rule of others")
        arguments += ["matrices", *(name for name in tables if name in chosen)]
    return {name: name in chosen for name in model}


def _is_matrix(division: Division) -> bool:
    """Is a parameter a matrix unless the user says otherwise?  Tables are tied, and along ep lie biases of experts."""
    return len(division.shape) == 2 and not division.tied and division.ep is None
