"""Embeddings and cross-entropy of a vocabulary that is divided along tp: numbers of one process, and planned words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import close, mesh_of, numbers

from pdgemm.errors import ArgumentError
from pdgemm.parallel.layers.vocabulary import CrossEntropy, Embedding, table_rows
from pdgemm.schedules.training.mesh_shape import block_of
from pdgemm.schedules.training.vocabulary_schedule import VocabularySchedule

pytestmark = pytest.mark.mpi
SIZES = [(33, 101, 12), (2, 3, 5), (0, 7, 4), (5, 1, 3), (40, 8, 1)]  # tokens, words of the vocabulary, hidden


def losses(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each token, and the gradient of their sum, with the largest logits of one process."""
    z = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    softmax = z / z.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    gradient = softmax.copy()
    gradient[rows, labels] -= 1
    return -np.log(softmax[rows, labels]), gradient


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize(("sequence", "dtype"), [(True, float), (False, float), (True, np.float32)])
def test_embedding(comm: Any, sequence: bool, dtype: Any) -> None:
    with mesh_of(comm) as mesh:
        tp, index = mesh.length("tp"), mesh.index("tp")
        for tokens, vocabulary, h in SIZES:
            layer = Embedding(mesh, vocabulary, h, sequence=sequence)
            ids = np.random.default_rng(7).integers(0, vocabulary, tokens)
            table, dy = numbers((vocabulary, h), 1, dtype), numbers((tokens, h), 2, dtype)
            rows = block_of(tokens, tp, index) if sequence else slice(None)
            planned = VocabularySchedule(tokens, h, sequence, np.dtype(dtype), tuple(range(tp))).words(index)
            mesh.traffic.clear()
            y = layer.forward(ids, table[layer.own])
            assert mesh.traffic["tensor"].words_received == planned["embedding"]
            np.testing.assert_array_equal(y, table[ids][rows])  # one addend is not 0
            dtable, wanted = np.ones_like(table[layer.own]), np.zeros((vocabulary, h))
            layer.backward(dy[rows], ids, dtable)
            np.add.at(wanted, ids, dy.astype(float))
            close(dtable - 1, wanted[layer.own], 1e-13 if dtype is float else 1e-5)
            words = planned["embedding"] + planned["embedding_gradient"]
            assert mesh.traffic["tensor"].words_received == words


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [float, np.float32])
def test_cross_entropy(comm: Any, dtype: Any) -> None:
    """Some tokens have no weight, and the largest logits lie on different ranks."""
    tolerance = 1e-13 if dtype is float else 1e-5
    with mesh_of(comm) as mesh:
        tp, index = mesh.length("tp"), mesh.index("tp")
        for tokens, vocabulary, h in SIZES:
            layer = CrossEntropy(mesh, vocabulary)
            labels = np.random.default_rng(8).integers(0, vocabulary, tokens)
            logits = numbers((tokens, vocabulary), 3, dtype) * dtype(30) + dtype(500)
            weights = (np.arange(tokens) % 3 > 0).astype(dtype)
            each, gradient = losses(logits.astype(float), labels)
            own = np.array(logits[:, layer.own])
            before = own.copy()
            planned = VocabularySchedule(tokens, h, True, np.dtype(dtype), tuple(range(tp))).words(index)
            for weighted in (None, weights):
                mesh.traffic.clear()
                loss, kept = layer.forward(own, labels, weighted)
                factors = np.ones(tokens) if weighted is None else weighted
                assert abs(loss - (each * factors).sum()) <= tolerance * max(1, each.sum())
                assert len(set(comm.allgather(loss))) == 1
                wanted = (gradient * factors[:, None] * 0.25)[:, layer.own]
                close(layer.backward(kept, 0.25), wanted, tolerance)
                assert mesh.traffic["tensor"].words_received == planned["cross_entropy"]
            np.testing.assert_array_equal(own, before)


def test_what_is_no_word_is_refused_on_all_ranks(comm: Any) -> None:
    """Other words and shapes are in test_bad_input.py."""
    with mesh_of(comm) as mesh:
        for layer in (lambda: Embedding(mesh, 0, 4), lambda: CrossEntropy(mesh, 0)):
            with pytest.raises(ArgumentError, match="vocabulary"):
                layer()
        with pytest.raises(ArgumentError, match="0 to 8, got 9 at token 1"):
            table_rows(np.zeros((9, 2)), np.array([8, 9]))


def test_other_words_on_another_rank_of_the_line_are_an_error_of_all(comm: Any) -> None:
    """As where each rank reads a batch of its own: at the first call with so many tokens, and no message later."""
    with mesh_of(comm) as mesh:
        embedding, head = Embedding(mesh, 10, 4), CrossEntropy(mesh, 10)
        own = head.own.stop - head.own.start
        same, other = np.array([1, 2]), np.array([1, 2 + (comm.rank == comm.size - 1)])
        table, logits = np.zeros((own, 4)), np.zeros((2, own))
        with pytest.raises(ArgumentError, match="ids with"):
            embedding.forward(other, table)
        with pytest.raises(ArgumentError, match="labels with"):
            head.forward(logits, other)
        with pytest.raises(ArgumentError, match="weights with"):
            head.forward(logits, same, other.astype(float))
        for ids in (same, same + 1):
            embedding.forward(ids, table)
            head.forward(logits, ids)
        assert len(embedding._known) == len(head._known) == 1
