"""Schedules of pipelines as values: what each stage does, when, what it keeps and what it sends.  Without MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product

import pytest

from pdgemm.errors import ArgumentError
from pdgemm.schedules.training.pipeline_orders import PIPELINES, Action, PipelineKind, register_pipeline
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule, layers_of


def schedules(stages: int, microbatches: int, chunks: int = 4) -> Iterator[PipelineSchedule]:
    """All schedules of up to so many stages, microbatches and chunks."""
    for p in range(1, stages + 1):
        for m in range(1, microbatches + 1):
            yield from (PipelineSchedule(name, p, m) for name in ("gpipe", "1f1b", "zero_bubble"))
            if m % p == 0:
                yield from (PipelineSchedule("interleaved", p, m, v) for v in range(1, chunks + 1))


def most_in_flight(s: PipelineSchedule, stage: int) -> int:
    """The published formula."""
    p, m, v = s.stages, s.microbatches, s.chunks
    return {
        "gpipe": m, "1f1b": min(m, p - stage), "zero_bubble": min(m, p),
        "interleaved": min(v * m, (v + 1) * p - 2 * stage - 1),
    }[s.name]  # fmt: skip


def test_bubbles_and_memory_are_those_of_the_papers() -> None:
    """As exact fractions, for up to 16 stages, 32 microbatches, 4 chunks, for fewer microbatches than stages, too."""
    for s in schedules(16, 32):
        p, m, v = s.stages, s.microbatches, s.chunks
        if p * m > 30 and ((m % p and m % 8) or (p * m > 200 and (p + m) % 5)):
            continue  # of the large ones some
        if s.name != "zero_bubble":
            assert s.bubble() == Fraction(p - 1, v * m), s
        elif m >= p:
            assert s.bubble() == Fraction(p - 1, 3 * m), s
        else:
            assert s.bubble() <= PipelineSchedule("1f1b", p, m).bubble(), s
        assert [s.in_flight(stage) for stage in range(p)] == [most_in_flight(s, stage) for stage in range(p)], s


def test_lengths_of_passes_change_no_bubble_but_that_of_zero_bubble() -> None:
    """(p-1)(F+B) for any F and B; (p-1)(F+B-W) where B is the gradient of the input: Qi et al. 2024, table 1."""
    for s in schedules(6, 12, 3):
        if s.name != "zero_bubble":
            assert s.walk({"F": 3, "B": Fraction(22, 5)}).bubble == s.bubble(), s
        elif s.microbatches >= s.stages:
            for F, B, W in ((5, 5, 4), (10, 10, 9), (4, 4, 4)):
                wait = (s.stages - 1) * (F + B - W)
                assert s.walk({"F": F, "B": B, "W": W}).seconds == s.microbatches * (F + B + W) + wait, s


def test_every_action_is_done_once_after_what_it_needs() -> None:
    """F of all blocks in their order, B back, W after B; gradients are added in the order of the microbatches."""
    for s in schedules(6, 8, 3):
        cells = {
            (x.action.kind, x.action.microbatch, x.action.chunk * s.stages + stage): x
            for stage, row in enumerate(s.walk().cells)
            for x in row
        }
        kinds = "FBW" if s.name == "zero_bubble" else "FB"
        assert s.split == (len(kinds) == 3)
        assert {*cells} == {(k, i, b) for k in kinds for i in range(s.microbatches) for b in range(s.blocks)}
        assert sum(len(s.order(stage)) for stage in range(s.stages)) == len(cells)
        for (kind, i, block), cell in cells.items():
            before = {"F": ("F", i, block - 1), "B": ("B", i, block + 1), "W": ("B", i, block)}[kind]
            assert before not in cells or cells[before].end <= cell.start, (s, kind, i, block)
            assert kind != "B" or cells["F", i, block].end <= cell.start
            assert i == 0 or cells[kind, i - 1, block].end <= cell.start
        for row in s.walk().cells:
            assert all(x.end <= y.start for x, y in pairwise(row))


def test_orders_that_end_nowhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages and what they wait for are named."""
    F, B = (lambda i: Action("F", i)), (lambda i: Action("B", i))

    def schedule(*orders: list[Action]) -> PipelineSchedule:
        monkeypatch.setitem(PIPELINES, "own", PIPELINES["gpipe"])
        register_pipeline("own", PipelineKind(lambda p, m, v, stage: orders[stage]))
        return PipelineSchedule("own", 2, len(orders[0]) // 2)

    for orders, message in (
        (([F(0), B(0)], [B(0), F(0)]), "stage 0 waits in B of microbatch 0 from stage 1; stage 1 waits in B"),
        (([F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]), "stage 0 waits in B .* 0 from stage 1; stage 1 waits"),
    ):
        with pytest.raises(ArgumentError, match=f"the stages wait for one another for ever: {message}"):
            schedule(*orders).walk()
    late = schedule([F(0), F(1), B(0), B(1)], [F(1), B(1), F(0), B(0)])
    assert late.walk().seconds == 12


def test_messages_are_sent_once_and_received_once() -> None:
    """All stages together receive 2 (v p - 1) messages a microbatch, from neighbours; their numbers differ."""
    for s in schedules(6, 6, 3):
        moved = [(step.takes, step.gives) for stage in range(s.stages) for step in s.steps(stage)]
        received, sent = (sorted(x for x in some if x is not None and x.travels) for some in zip(*moved))
        assert received == sent and len({*sent}) == len(sent) == 2 * (s.blocks - 1) * (s.stages > 1) * s.microbatches
        assert all(abs(x.source - x.target) % s.stages in (1, s.stages - 1) for x in sent)
        numbers = [s.number(x) for x in sent]
        assert len({*numbers}) == len(numbers) and all(0 <= n < 2 * s.microbatches * s.blocks for n in numbers)


def test_handovers_are_in_the_order_of_the_schedule() -> None:
    """1f1b on the middle one of three stages."""
    moved = [x for _, takes, gives in PipelineSchedule("1f1b", 3, 2).steps(1) for x in (takes, gives) if x is not None]
    assert [(x.kind, x.microbatch, x.source, x.target) for x in moved] == [
        ("F", 0, 0, 1), ("F", 0, 1, 2), ("F", 1, 0, 1), ("F", 1, 1, 2),
        ("B", 0, 2, 1), ("B", 0, 1, 0), ("B", 1, 2, 1), ("B", 1, 1, 0),
    ]  # fmt: skip


def test_stages_of_unequal_length() -> None:
    """By hand: the second of two stages takes twice as long, and the first one waits for it."""
    timeline = PipelineSchedule("1f1b", 2, 2).walk(lambda stage, action: (1 + stage) * {"F": 1, "B": 2}[action.kind])
    assert [[(x.start, x.end) for x in row] for row in timeline.cells] == [
        [(0, 1), (1, 2), (7, 9), (13, 15)], [(1, 3), (3, 7), (7, 9), (9, 13)],
    ]  # fmt: skip
    assert timeline.seconds == 15 and timeline.bubble == Fraction(2 * 15 - 18, 18)
    assert timeline.busy(0) == 6 and timeline.busy(1) == 12
    seconds = PipelineSchedule("1f1b", 2, 2).walk({"F": 0.1, "B": 0.2})
    assert abs(seconds.seconds - 0.9) < 1e-15 and abs(seconds.bubble - Fraction(1, 2)) < 1e-15


DRAWN = """\
1f1b: 3 stages, 4 microbatches
                                                                 in flight   idle
stage 0  F0 F1 F2 ............B0    F3 B1    ...B2    ...B3              3  33.3%
stage 1  ...F0 F1 ......B0    F2 B1    F3 B2    ...B3    ......          2  33.3%
stage 2  ......F0 B0    F1 B1    F2 B2    F3 B3    ............          1  33.3%
F: forward pass of a microbatch, B: backward pass
waiting / working: 1/2 = 50.0%; 33.3% of all time"""


def test_pipelines_draw_themselves() -> None:
    assert str(PipelineSchedule("1f1b", 3, 4).walk()) == DRAWN
    text = str(PipelineSchedule("interleaved", 2, 4, 2).walk())
    assert "stage 1  ...A0 A1 B0 b0    B1 b1    A2 a0    A3 a1    B2 b2    B3 b3    a2    a3    ......  " in text
    assert "\nA, B: forward pass of a microbatch in each chunk of a stage; small letters: backward pass\n" in text
    text = str(PipelineSchedule("zero_bubble", 2, 3).walk())
    assert "stage 0  F0 F1 ...B0 W0 F2 B1 W1 B2 W2  " in text and "stage 1  ...F0 B0 F1 B1 W0 F2 B2 W1 W2  " in text
    assert "\nF: forward pass of a microbatch, B: gradient of the input, W: gradients of the weights\n" in text


def test_drawings_of_many_microbatches_are_readable() -> None:
    """No label is cut, in any width: where the stages need more columns, the middle is left out."""
    for s, seconds, columns in product(schedules(4, 24, 3), (None, {"F": 0.7, "B": 1.1, "W": 0.9}), (90, 150)):
        if s.microbatches not in (1, 10, 24) or s.stages not in (1, 4):
            continue
        lines = s.walk(seconds).draw(columns).splitlines()
        assert max(map(len, lines[1:-2])) <= columns
        for stage, line in enumerate(lines[2:-2]):
            text = line[len("stage 0  ") : -len("  in flight   idle")]
            labels = re.findall(r"[A-Za-z]+\d*|\d+", text)
            letter = {("F", 0): "A", ("F", 1): "B", ("F", 2): "C", ("B", 0): "a", ("B", 1): "b", ("B", 2): "c"}
            names = [f"{letter[kind, c] if s.chunks > 1 else kind}{i}" for kind, i, c in s.order(stage)]
            assert labels == names or ("//" in text and {*labels} < {*names}), line


def test_a_drawing_of_a_run_has_dashes_for_short_actions() -> None:
    """One action that takes hardly any time does not stretch all others."""
    schedule = PipelineSchedule("1f1b", 2, 4)
    timeline = schedule.walk(lambda stage, action: 0.01 if action == ("B", 1, 0) and stage else 1.0 + 0.01 * stage)
    first, second = str(timeline).splitlines()[2:4]
    assert "//" not in first + second and max(map(len, (first, second))) == 150
    assert re.findall(r"[FB]\d", first) == [f"{kind}{i}" for kind, i, _ in schedule.order(0)]
    assert re.findall(r"[FB]\d|-+", second) == [
        f"{x.kind}{x.microbatch}" for x in schedule.order(1) if x[:2] != ("B", 1)
    ]
    text = str(schedule.walk(lambda stage, action: 0.2 if action == ("B", 1, 0) and stage else 1.0))
    assert re.findall(r"[FB]\d|-+", text.splitlines()[3]) == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "schedules of pipelines are gpipe, 1f1b, interleaved, zero_bubble; got '2f2b'"),
        (("1f1b", 0, 2), "stages"),
        (("1f1b", 2, 0), "microbatches"),
        (("interleaved", 2, 2, 0), "chunks"),
        (("1f1b", 2, 2, 2), "1f1b has one chunk of layers on each stage, got chunks=2"),
        (("zero_bubble", 2, 2, 3), "zero_bubble has one chunk of layers on each stage, got chunks=3"),
        (("interleaved", 4, 6, 2), r"here 4, 8, 12, \.\.\.; got 6, and the nearest is 4 or 8"),
        (("interleaved", 4, 3, 2), "got 3, and the nearest is 4"),
    ],
)
def test_bad_arguments(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        PipelineSchedule(*arguments)


def test_bad_seconds() -> None:
    with pytest.raises(ArgumentError, match="seconds of each kind of action are needed, and 'W' is missing"):
        PipelineSchedule("zero_bubble", 2, 2).walk({"F": 1, "B": 1})
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=f"B of stage 1 takes {bad} seconds; expected 0 or more"):
            PipelineSchedule("gpipe", 2, 2).walk({"F": 1, "B": bad})
    with pytest.raises(ArgumentError, match="no time at all"):
        PipelineSchedule("gpipe", 2, 2).walk({"F": 0, "B": 0})
    timeline = PipelineSchedule("zero_bubble", 2, 2).walk({"F": 1, "B": 1, "W": 0})  # stages without weights
    assert timeline.seconds == 6 and "W" not in str(timeline).splitlines()[2]


def test_layers_of_blocks() -> None:
    """Each layer is in one block, in the order of the blocks; the first blocks have one more."""
    for stages, chunks in ((1, 1), (3, 1), (2, 3), (4, 2)):
        blocks = stages * chunks
        for layers in range(blocks, 3 * blocks + 1):
            parts = [layers_of(layers, stages, chunks, b % stages, b // stages) for b in range(blocks)]
            assert [layer for part in parts for layer in part] == [*range(layers)]
            sizes = [len(part) for part in parts]
            assert sorted(sizes, reverse=True) == sizes and sizes[0] - sizes[-1] <= 1 <= sizes[-1]
    with pytest.raises(ArgumentError, match="5 layers on 3 stages of 2 chunks: each of the 6 has at least one layer"):
        layers_of(5, 3, 2, 0, 0)
