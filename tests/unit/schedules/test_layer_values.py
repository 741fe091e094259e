"""What layers move, as values: sums over parts of any size, and Megatron's formulas where parts are equal."""

from __future__ import annotations

import numpy as np
import pytest

from pdgemm.schedules.training.context_schedule import ContextSchedule
from pdgemm.schedules.training.linear_schedule import LinearSchedule
from pdgemm.schedules.training.vocabulary_schedule import VocabularySchedule

FLOAT = np.dtype(np.float32)
WAYS = [(split, sequence) for split in ("columns", "rows") for sequence in (True, False)]


@pytest.mark.parametrize(("split", "sequence"), WAYS)
@pytest.mark.parametrize(("tokens", "t"), [(33, 4), (2, 5), (0, 3), (9, 8), (1, 2), (24, 4), (6, 1)])
def test_a_linear_layer_moves_what_megatron_does(split: str, sequence: bool, tokens: int, t: int) -> None:
    """A rank receives all rows but its own, or t - 1 times its own, in parts of any size."""
    m, n, line = 7, 10, tuple(range(3, 3 + t))  # ranks of a mesh
    schedule = LinearSchedule(split, sequence, tokens, m, n, FLOAT, line)  # type: ignore[arg-type]
    width, block = m if split == "columns" else n, -(-tokens // t)
    owned = [len(range(min(tokens, i * block), min(tokens, (i + 1) * block))) for i in range(t)]
    assert sum(owned) == tokens
    shapes = [schedule.shapes(rank) for rank in line]
    for rank, own, shape in zip(line, owned, shapes):
        gathered, reduced = (tokens - own) * width, (t - 1) * own * width
        words = {
            ("columns", True): [gathered, reduced, gathered], ("rows", True): [reduced, gathered, 0],
            ("columns", False): [0, gathered + reduced, 0], ("rows", False): [gathered + reduced, 0, 0],
        }  # fmt: skip
        assert list(schedule.words(rank).values()) == words[split, sequence]
        assert schedule.activation_bytes(rank) == 4 * np.prod(shape["x"])
        assert shape["w"][0] == shape["x"][1] and shape["w"][1] == shape["y"][1]
    whole, divided = ("x", "y") if split == "columns" else ("y", "x")
    assert sum(x[divided][1] for x in shapes) == (n if split == "columns" else m)
    assert {x[divided][0] for x in shapes} == {tokens}
    assert [x[whole][0] for x in shapes] == (owned if sequence else [tokens] * t)


@pytest.mark.parametrize(("tokens", "t"), [(32, 4), (33, 4), (2, 5), (0, 3), (6, 1)])
def test_a_vocabulary_moves_rows_and_three_words_a_token(tokens: int, t: int) -> None:
    for sequence in (True, False):
        schedule = VocabularySchedule(tokens, 6, sequence, FLOAT, tuple(range(t)))
        for rank, own in enumerate(schedule.rows):
            gathered, reduced = tokens - own, (t - 1) * own
            words = schedule.words(rank)
            assert words["embedding"] == 6 * (reduced if sequence else reduced + gathered)
            assert words["embedding_gradient"] == (6 * gathered if sequence else 0)
            assert words["cross_entropy"] == 3 * (reduced + gathered)


def test_chunks_of_positions() -> None:
    schedule = ContextSchedule(33, (0, 1, 2))
    positions = [schedule.positions(rank).tolist() for rank in range(3)]
    assert positions == [[*range(6), *range(30, 33)], [*range(6, 12), *range(24, 30)], [*range(12, 24)]]
    assert schedule.counts == (9, 12, 12) and ContextSchedule(4, (0, 1, 2)).counts == (1, 1, 2)


@pytest.mark.parametrize("sequence", [1, 5, 33, 64, 1000])
@pytest.mark.parametrize("c", [1, 2, 3, 8])
def test_each_position_is_on_one_rank(sequence: int, c: int) -> None:
    """All keys but the own ones come in; where 2c divides the sequence, each rank's queries see as many keys."""
    schedule = ContextSchedule(sequence, tuple(range(c)))
    positions = [schedule.positions(rank) for rank in range(c)]
    assert sorted(np.concatenate(positions).tolist()) == [*range(sequence)]
    for rank, own in enumerate(positions):
        words = {"gather": (sequence - len(own)) * 6, "reduce": (c - 1) * len(own) * 6}
        assert schedule.words(rank, 6) == words
    if sequence % (2 * c) == 0:
        assert len({(own + 1).sum() for own in positions}) == 1
