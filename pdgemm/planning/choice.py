"""Choose by formula alone: which algorithm, on which grid of any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.algorithm_grids import cuts, impossible
from pdgemm.planning.candidate_table import Candidate
from pdgemm.planning.candidates import Problem, on_new_grid
from pdgemm.planning.estimates import Estimate, Question
from pdgemm.planning.grid_search import IDLE
from pdgemm.schedules import Product
from pdgemm.support.text import in_bytes

_KEEP = 3  # grids of each kind that are looked at
_TIE = 1.01  # words that count as equal; then time decides
_SLOW = 1.6  # times as long as the fastest: no alternative, such as what fits the memory with thin panels only


def estimates(question: Question) -> list[Candidate]:
    """What there is to choose from, the choice first.

    The choice sends the fewest words of what fits the memory, leaves few ranks idle and takes at most 1.6 times as long
    as the fastest of those; of equal words, to within 1%, it is the fastest.
    Raises ArgumentError where nothing is possible, MemoryLimitError where nothing fits.
    """
    best, found = chosen(question)
    limit = question.memory
    others = []
    for x in found:
        if limit is not None and x.memory() > limit:
            others.append(x.candidate(f"needs {in_bytes(x.memory())}"))
        elif x.key != best.key:
            idle = f"{x.work / best.work:.2f} times the work, " if x.work * (1 - IDLE) > best.work > 0 else ""
            words = f"{x.words / best.words:.2f} times the words, " if best.words else ""
            time = f"{x.seconds / best.seconds:.2f} times the time" if best.seconds else "as long"
            others.append(x.candidate(f"{idle}{words}{time}"))
    return [best.candidate("chosen", chosen=True), *sorted(others, key=lambda x: (x.words_per_rank, x.seconds))]


def chosen(question: Question) -> tuple[Estimate, list[Estimate]]:
    """The choice, and all it was chosen from, with panels that fit the memory where that can be."""
    found = [_fitted(x) for x in {x.key: x for x in all_estimates(question)}.values()]
    if not found:
        raise ArgumentError(impossible(question.wish, question.ranks))
    limit = question.memory
    fitting = [x for x in found if limit is None or x.memory() <= limit]
    if not fitting:
        needed = min(x.memory() for x in found)
        raise MemoryLimitError(
            f"{in_bytes(limit or 0)} per rank is too small: at least {in_bytes(needed)} are needed on "
            f"{question.ranks} ranks, of which {in_bytes(question.share_bytes(question.ranks))} are A, B and C"
        )
    least = min(x.work for x in fitting)
    busy = [x for x in fitting if x.work * (1 - IDLE) <= least]
    fastest = min(x.seconds for x in busy)
    quick = [x for x in busy if x.seconds <= _SLOW * fastest]
    fewest = min(x.words for x in quick)
    return min((x for x in quick if x.words <= _TIE * fewest), key=lambda x: x.seconds), found


def all_estimates(question: Question) -> Iterator[Estimate]:
    """The best grids of each family, and where memory is limited the best of those that leave room for layers."""
    room = None
    if question.memory is not None:
        room = (question.memory - question.share_bytes(question.ranks)) / question.dtype.itemsize
    for cut in cuts(question.mnk, question.ranks, question.wish, _KEEP, room):
        yield Estimate(question.T if cut.transposed else question, *cut)


def product_of(estimate: Estimate) -> Product:
    """The product itself, on layouts that it wants."""
    question, cut = estimate.question, estimate.cut
    asked = question.T if cut.transposed else question
    m, n, k = asked.mnk
    ranks = tuple(range(question.ranks))
    shares = cut.box.shares if cut.family == "inner" else (question.ranks, 1)  # "inner" leaves C where it is
    A, B, C = (
        Layout(Distribution.over(grid, shape), ranks, question.dtype)
        for grid, shape in (((question.ranks, 1), (m, k)), ((question.ranks, 1), (k, n)), (shares, (m, n)))
    )
    problem = Problem(A, B, C, question.ranks, True, question.dtype, question.width, question.lookahead, question.mover)
    return on_new_grid(problem, cut)


def _fitted(estimate: Estimate) -> Estimate:
    """With panels as wide as the memory allows, and not narrower than 1."""
    question, limit = estimate.question, estimate.question.memory
    if limit is None or estimate.memory() <= limit:
        return estimate
    low, high = 1, question.width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate.memory(middle) <= limit else (low, middle)
    return replace(estimate, question=replace(question, width=low))
