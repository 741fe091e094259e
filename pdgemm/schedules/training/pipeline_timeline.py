"""The walk of a pipeline through time, by what its stages wait for, and its drawing as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple

from pdgemm.errors import ArgumentError
from pdgemm.schedules.training.pipeline_orders import Action, ActionKind

COLUMNS = 150  # of a drawing
_EXACT = 10_000  # the largest denominator of a fraction that is printed


class Handover(NamedTuple):
    """What a block of layers hands to the next one, or back: activations ("F") or their gradients ("B").

    block : the block that takes it.   source, target : the stages of both blocks, which may be the same stage.
    """

    kind: ActionKind
    microbatch: int
    block: int
    source: int
    target: int

    @property
    def travels(self) -> bool:
        """Is it a message between stages?"""
        return self.source != self.target


class PipelineStep(NamedTuple):
    """An action of a stage, what it takes from another block, and what it hands to another block; None: nothing."""

    action: Action
    takes: Handover | None
    gives: Handover | None


class TimelineCell(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: Any
    end: Any


@dataclass(frozen=True)
class Timeline:
    """When the stages of a pipeline do what.  `str()` draws it: a line a stage, and time from left to right.

    title : of the drawing.   cells : of each stage, its actions with their times.
    in_flight : of each stage, the most microbatches (of a chunk) of which it has activations.
    """

    title: str
    cells: tuple[tuple[TimelineCell, ...], ...]
    in_flight: tuple[int, ...]

    @property
    def seconds(self) -> Any:
        """The time, from 0, at the end of the last action."""
        return max(cell.end for row in self.cells for cell in row)

    def busy(self, stage: int) -> Any:
        """Return the time in which a stage works."""
        return sum(cell.end - cell.start for cell in self.cells[stage])

    @property
    def bubble(self) -> Fraction:
        """The time in which stages wait over the time in which they work, of all stages together."""
        busy = Fraction(sum(self.busy(stage) for stage in range(len(self.cells))))
        return len(self.cells) * Fraction(self.seconds) / busy - 1

    def draw(self, columns: int = COLUMNS) -> str:
        """Return the drawing in so many columns; where it needs more, the middle is left out."""
        cells = [cell for row in self.cells for cell in row]
        chunked = any(cell.action.chunk for cell in cells)
        label = max(len(_label(cell.action, chunked)) for cell in cells)
        name = len(f"stage {len(self.cells) - 1}")
        most = columns - name - len(_HEADING) - 4
        scale = _scale(cells, Fraction(self.seconds), label, most)
        rows = [_drawn_row(row, scale, self.seconds, chunked) for row in self.cells]
        if (width := len(rows[0])) > most:
            rows = [_without_middle(row, most) for row in rows]
            width = most
        lines = [self.title, " " * (name + width + 4) + _HEADING]
        for stage, text in enumerate(rows):
            idle = 1 - self.busy(stage) / self.seconds
            numbers = f"{self.in_flight[stage]:>9} {float(idle):>6.1%}"
            lines.append(f"stage {stage:<{name - 6}}  {text}  {numbers}")
        return "\n".join([*lines, *_legend(cells, chunked), self._bubble_text()])

    def __str__(self) -> str:
        return self.draw()

    def _bubble_text(self) -> str:
        bubble = self.bubble
        exact = f"{bubble} = " if 1 < bubble.denominator <= _EXACT else ""
        return f"waiting / working: {exact}{float(bubble):.1%}; {float(bubble / (1 + bubble)):.1%} of all time"


_HEADING = "in flight   idle"
_BEFORE: dict[ActionKind, ActionKind] = {"B": "F", "W": "B"}  # what the stage itself has done before
_CUT = " // "


def _label(action: Action, chunked: bool) -> str:
    """Return the text of an action: F3, B3 or W3; with several chunks A3, B3 ... forward, and a3, b3 ... backward."""
    letter: str = action.kind
    if chunked and action.kind != "W":
        letter = chr(ord("A" if action.kind == "F" else "a") + action.chunk % 26)
    return f"{letter}{action.microbatch}"


def _scale(cells: list[TimelineCell], seconds: Fraction, label: int, most: int) -> Fraction:
    """Return the columns of a second: for all labels and a column between them, where `most` columns are enough.

    Else without such a column, where times are multiples of the shortest one; else for most of the labels.
    """
    lengths = sorted(Fraction(cell.end) - Fraction(cell.start) for cell in cells if cell.end > cell.start)
    spaced, tight, whole = (label + 1) / lengths[0], label / lengths[0], most / seconds
    if seconds * spaced <= most:
        return spaced
    if seconds * tight <= most and all(Fraction(cell.end) % lengths[0] == 0 for cell in cells):
        return tight
    return whole if whole * lengths[(len(lengths) - 1) // 2] >= label + 1 else spaced


def _drawn_row(row: Sequence[TimelineCell], scale: Fraction, seconds: Any, chunked: bool) -> str:
    """Return the text of a stage: the label of each action, spaces up to its end, and dots where the stage waits.

    What is too short for its label is a dash.
    """
    text, at = "", 0
    for cell in row:
        start, end = (round(Fraction(x) * scale) for x in (cell.start, cell.end))
        label = _label(cell.action, chunked)
        text += "." * (start - at) + (f"{label:{end - start}}" if len(label) <= end - start else "-" * (end - start))
        at = len(text)
    return text + "." * (round(Fraction(seconds) * scale) - at)


def _without_middle(text: str, most: int) -> str:
    """Return the beginning and the end of a text; labels that would be cut are left out."""
    head = (most - len(_CUT)) // 2
    tail = len(text) - (most - len(_CUT) - head)
    before = re.sub(r"\w+$", _blank, text[:head]) if text[head].isdigit() else text[:head]
    after = re.sub(r"^\d+", _blank, text[tail:])
    return before + _CUT + after


def _blank(text: re.Match[str]) -> str:
    return " " * len(text[0])


def _legend(cells: list[TimelineCell], chunked: bool) -> list[str]:
    """Return a line that says what the letters of a drawing mean."""
    split = any(cell.action.kind == "W" for cell in cells)
    if chunked:
        last = max(cell.action.chunk for cell in cells)
        letters = ", ".join(chr(ord("A") + chunk % 26) for chunk in range(last + 1))
        return [f"{letters}: forward pass of a microbatch in each chunk of a stage; small letters: backward pass"]
    backward = "B: gradient of the input, W: gradients of the weights" if split else "B: backward pass"
    return [f"F: forward pass of a microbatch, {backward}"]


def walked(
    steps: Sequence[Sequence[PipelineStep]], seconds: Callable[[int, Action], Any]
) -> tuple[tuple[TimelineCell, ...], ...]:
    """Return the times of the steps of all stages, each of which begins as soon as what it takes is there.

    seconds : a function of the stage and the action.
    Raises ArgumentError where the stages wait for one another for ever, and says for what, and for negative seconds.
    """
    cells: list[list[TimelineCell]] = [[] for _ in steps]
    arrived, complete = dict[Handover, Any](), set[tuple[int, Action]]()
    before = -1
    while before < (before := len(complete)):  # until no stage goes on
        for stage, row in enumerate(steps):
            for action, takes, gives in row[len(cells[stage]) :]:
                first = (stage, action._replace(kind=_BEFORE[action.kind])) if action.kind in _BEFORE else None
                if (takes and takes not in arrived) or (first and first not in complete):
                    break
                length = seconds(stage, action)
                if not 0 <= length < inf:
                    raise ArgumentError(f"{action.kind} of stage {stage} takes {length} seconds; expected 0 or more")
                start = max(cells[stage][-1].end if cells[stage] else 0, arrived[takes] if takes else 0)
                cells[stage].append(TimelineCell(action, start, start + length))
                complete.add((stage, action))
                if gives:
                    arrived[gives] = start + length
    if waits := [
        _wait(stage, row[len(cells[stage])]) for stage, row in enumerate(steps) if len(cells[stage]) < len(row)
    ]:
        raise ArgumentError(f"the stages wait for one another for ever: {'; '.join(waits)}")
    if not any(cell.end for row in cells for cell in row):
        raise ArgumentError("the actions of a pipeline take no time at all")
    return tuple(map(tuple, cells))


def _wait(stage: int, step: PipelineStep) -> str:
    """Return what a stage waits for, as text."""
    source = f" from stage {step.takes.source}" if step.takes else ""
    return f"stage {stage} waits in {step.action.kind} of microbatch {step.action.microbatch}{source}"
