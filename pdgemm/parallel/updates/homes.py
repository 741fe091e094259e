"""Homes: where matrices that ranks update in parts come together, each whole on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.matrix.batch import balance
from pdgemm.parallel.buckets import Buckets
from pdgemm.parallel.layout_choice import STAGE
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import as_table
from pdgemm.parallel.updates.muon import Muon
from pdgemm.schedules.training.home_exchange import HeldPart, HomeExchange
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
    """

    def __init__(self, buckets: Buckets, rule: Muon, names: Iterable[str]) -> None:
        self._buckets, self.rule, self._line = buckets, rule, buckets.mesh.line(STAGE)
        self._kind = buckets.layouts.whole.wide
        shapes = {name: buckets.divisions[name].shape for name in names}
        self._shapes = {name: shape for name, shape in shapes.items() if prod(shape)}
        self.names = (*self._shapes,)
        of_ranks = self._line.comm.allgather([self._held(name) for name in self.names])
        products = [(min(x), min(x), max(x)) for x in map(as_table, self._shapes.values())]  # X X^T
        homes = balance(products, self._line.size)
        self.exchange = HomeExchange(self._line.size, tuple(map(int, homes)), tuple(zip(*of_ranks)), self._kind)

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

    def update(self, parts: Sequence[Array]) -> None:
        """Overwrite what this rank updates of each matrix, flat, by its part of `Muon.whole_updates`."""
        if not self.names:
            return
        exchange = self.exchange
        wholes = self._gathered(self._exchanged(lambda at, _: parts[at], back=False))
        self._rewrite([*wholes.values()])
        views = {at: dict[Any, Array]() for at in wholes}  # by window, so that each is copied once

        def part(at: int, target: int) -> Array:
            held = exchange.held[at][target]
            if held.window not in views[at]:
                views[at][held.window] = wholes[at][held.place].ravel()
            return views[at][held.window][held.start : held.stop]

        for (at, _), x in self._exchanged(part, back=True).items():
            parts[at][...] = x

    def _exchanged(self, part: Callable[[int, int], Array], back: bool) -> dict[tuple[int, int], Array]:
        """Send parts to the homes or back, and return what comes here, by the number of the matrix and the source.

        part : function of a matrix and a target.
        """
        exchange, line, mesh, me = self.exchange, self._line, self._buckets.mesh, self._line.rank
        none, ranks = np.empty(0, self._kind), range(line.size)
        routes = exchange.routes(back)
        leaving = [[none, *(part(at, to) for at in routes.get((me, to), ()))] for to in ranks]
        arrived = all_to_all(
            exchange.exchange(back),
            mesh.checks(line).messages,
            [np.concatenate(x) for x in leaving],
            mesh.traffic["homes"],
            lambda group: mesh.wait(group, line),
            mesh.checks(line).tag(_TAG),
        )
        pieces = dict[tuple[int, int], Array]()
        for source, flat in enumerate(arrived):
            numbers = routes.get((source, me), [])
            words = [exchange.held[at][me if back else source].words for at in numbers]
            for at, x in zip(numbers, np.split(flat, np.cumsum(words)[:-1])):
                pieces[at, source] = x
        return pieces

    def _gathered(self, pieces: dict[tuple[int, int], Array]) -> dict[int, Array]:
        """Return the whole matrices of which this rank is the home, in the shapes of parameters.  Local."""
        wholes, shapes = dict[int, Array](), [*self._shapes.values()]
        for at in (at for at, home in enumerate(self.exchange.homes) if home == self._line.rank):
            held, wholes[at] = self.exchange.held[at], np.empty(shapes[at], self._kind)
            windows = defaultdict[Any, list[int]](list)
            for source in self.exchange.sources[at]:
                windows[held[source].window].append(source)
            for sources in windows.values():
                flat = np.concatenate([pieces[at, x] for x in sorted(sources, key=lambda x: held[x].start)])
                wholes[at][held[sources[0]].place] = flat.reshape(held[sources[0]].shape)
        return wholes

    def _rewrite(self, wholes: Sequence[Array]) -> None:
        """Overwrite whole matrices by their updates; those of equal shapes, or of the transposed one, are stacked."""
        stacks = defaultdict[tuple[int, int], list[Array]](list)
        for whole in wholes:
            table = whole.reshape(as_table(whole.shape))
            table = table if len(table) <= table.shape[1] else table.T
            stacks[table.shape].append(table)
        for shape, tables in stacks.items():
            stack = np.empty((len(tables), *shape), self._kind)  # row by row, also where all tables are transposed
            for x, table in zip(stack, tables):
                x[...] = table
            self.rule.whole_updates(stack)
            for table, x in zip(tables, stack):
                table[...] = x


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
