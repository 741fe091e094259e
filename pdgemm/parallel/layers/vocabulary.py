"""Embeddings and cross-entropy of a vocabulary that is divided along tp."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pdgemm.local.arrays.arguments import as_count
from pdgemm.parallel.layers.array_checks import SameContent, check_array, check_ids
from pdgemm.parallel.layers.line_collectives import line_collectives
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.training.mesh_shape import block_of
from pdgemm.schedules.training.row_collectives import rows_by_rank

Array = np.ndarray


def table_rows(table: Array, ids: Array) -> Array:
    """Return table[ids], in float32 or float64.  Local.

    Raises ArgumentError where an id is no row of the table, as a position beyond a table of positions.
    """
    check_array("table", table, (None, None), "")
    check_ids("ids", ids, len(table))
    return table[ids].astype(np.result_type(table.dtype, np.float32), copy=False)


def add_table_rows(dy: Array, ids: Array, dtable: Array) -> None:
    """Add the rows of dy to those of dtable with these ids, in the order of tokens: the backward of `table_rows`."""
    if len(ids):
        order = np.argsort(ids, kind="stable")
        rows, starts = np.unique(ids[order], return_index=True)
        dtable[rows] += np.add.reduceat(dy[order], starts, axis=0)


class Embedding:
    """Rows of a table (vocabulary, h) by the ids of T tokens; the table is divided along tp by rows.  Collective.

    sequence : a rank has own rows of the result, in blocks of ceil(T/t); False: it has all.
    The table is in blocks of ceil(vocabulary/t) rows, of which the last ones may be short or empty.

    Words: a reduce-scatter of (T, h), without `sequence` an all-reduce; and in the backward pass an all-gather, without
    `sequence` nothing: `VocabularySchedule`, counted in `mesh.traffic["tensor"]`.
    """

    def __init__(self, mesh: Mesh, vocabulary: int, h: int, *, sequence: bool = True) -> None:
        self._line = line_collectives(mesh, "tp", "tensor")
        with self._line.checked(set()) as arguments:
            self.vocabulary, self.h = as_count(vocabulary, "vocabulary", 1), as_count(h, "h", 0)
            self.sequence = bool(sequence)
            arguments += ["Embedding", self.vocabulary, self.h, self.sequence]
        self.own = block_of(self.vocabulary, self._line.size, self._line.index)
        self._known = set[Any]()

    def forward(self, ids: Array, table: Array) -> Array:
        """Return table[ids]: own rows, or all.  Collective over the line of tp.

        ids : (T,), the same on all ranks of the line.   table : (own rows, h).
        Raises ArgumentError, DTypeError or LayoutError on all ranks of the line where an id is not in the vocabulary.
        """
        with self._line.checked(self._known) as arguments:
            self._check("table", table, ids)
            arguments += ["Embedding.forward", len(ids), wide := np.result_type(table.dtype, np.float32)]
            arguments += [SameContent.of("ids", ids)]
        if self._line.size == 1:
            return table[ids].astype(wide, copy=False)
        rows = self._line.addends((len(ids), self.h), wide)
        here = self._here(ids)
        rows[here] = table[ids[here] - self.own.start]
        rows[~here] = 0
        counts = rows_by_rank(len(ids), self._line.size)
        return self._line.own_sums(rows, counts) if self.sequence else self._line.sums(rows, counts)

    def backward(self, dy: Array, ids: Array, dtable: Array) -> None:
        """Add the gradient of the table: to each row the sum of dy over its tokens.  Collective over the line of tp.

        dy : as `forward` returned rows.   dtable : (own rows, h).   Raises exceptions as `forward`.
        """
        with self._line.checked(self._known) as arguments:
            where = self._check("dtable", dtable, ids)
            counts = rows_by_rank(len(ids), self._line.size)
            rows = counts[self._line.index] if self.sequence else len(ids)
            check_array("dy", dy, (rows, self.h), where)
            arguments += ["Embedding.backward", len(ids), dy.dtype, SameContent.of("ids", ids)]
        if self.sequence and self._line.size > 1:
            dy = self._line.gather(dy, counts)
        here = self._here(ids)
        add_table_rows(dy[here], ids[here] - self.own.start, dtable)

    def _here(self, ids: Array) -> Array:
        """Return which tokens have their row on this rank."""
        here: Array = (ids >= self.own.start) & (ids < self.own.stop)
        return here

    def _check(self, name: str, table: Array, ids: Array) -> str:
        """Check the part of a table, and ids; return the place as text."""
        where = f"on {self._line.where} of an embedding {self.vocabulary} x {self.h}"
        check_ids("ids", ids, self.vocabulary, where)
        check_array(name, table, (self.own.stop - self.own.start, self.h), where)
        return where


class _Softmax(NamedTuple):
    """What a cross-entropy keeps for its gradient."""

    exponentials: Array
    sums: Array
    here: Array  # tokens whose label is on this rank
    columns: Array  # of their labels
    weights: Array | None


class CrossEntropy:
    """-log softmax(logits)[label] of T tokens, of a vocabulary that is divided along tp by columns.  Collective.

    A rank has columns in blocks of ceil(vocabulary/t), of which the last ones may be short or empty.

    Words: all-reduces of 3 words a token, its largest logit, the sum of its exponentials and the logit of its label:
    `VocabularySchedule`, counted in `mesh.traffic["tensor"]`.   Memory: two arrays like the logits.
    """

    def __init__(self, mesh: Mesh, vocabulary: int) -> None:
        self._line = line_collectives(mesh, "tp", "tensor")
        with self._line.checked(set()) as arguments:
            self.vocabulary = as_count(vocabulary, "vocabulary", 1)
            arguments += ["CrossEntropy", self.vocabulary]
        self.own = block_of(self.vocabulary, self._line.size, self._line.index)
        self._known = set[Any]()

    def forward(self, logits: Array, labels: Array, weights: Array | None = None) -> tuple[float, Any]:
        """Return the sum of weight times loss over the tokens, and what `backward` takes.  Collective.

        logits : (T, own columns).   labels : (T,), the same on all ranks of the line.   weights : (T,), by default 1.
        The sum is a float64, the same on all ranks of the line.  It is not divided by a number of tokens: a loss is
        divided once, by that of all ranks and microbatches.
        Raises ArgumentError, DTypeError or LayoutError on all ranks of the line, as where a label is not in the
        vocabulary.
        """
        with self._line.checked(self._known) as arguments:
            where = f"on {self._line.where} of {self.vocabulary} columns"
            check_ids("labels", labels, self.vocabulary, where)
            check_array("logits", logits, (len(labels), self.own.stop - self.own.start), where)
            if weights is not None:
                check_array("weights", weights, (len(labels),), where)
            arguments += ["CrossEntropy", len(labels), wide := np.result_type(logits.dtype, np.float32)]
            arguments += [
                SameContent.of("labels", labels),
                SameContent.of("weights", [] if weights is None else weights),
            ]
        counts, alone = rows_by_rank(len(labels), self._line.size), self._line.size == 1
        largest = logits.max(axis=1, initial=-np.inf).astype(wide, copy=False)
        if not alone:
            largest = self._line.largest(largest, counts)
        z = logits - largest[:, None]
        here = (labels >= self.own.start) & (labels < self.own.stop)
        columns = labels[here] - self.own.start
        pairs = (
            self._line.addends((len(labels), 2), wide) if not alone else np.empty((len(labels), 2), wide)
        )  # of each token: the sum of exponentials, and the logit of the label
        pairs[:, 1] = 0
        pairs[here, 1] = z[here, columns]
        np.exp(z, out=z)
        np.sum(z, axis=1, out=pairs[:, 0])
        if not alone:
            pairs = self._line.sums(pairs, counts)
        losses = np.log(pairs[:, 0], dtype=np.float64) - pairs[:, 1]
        loss = losses.sum() if weights is None else (losses * weights).sum()
        return float(loss), _Softmax(z, pairs[:, 0], here, columns, weights)

    def backward(self, kept: Any, factor: float = 1.0) -> Array:
        """Return the gradient by the logits of factor times the loss, (T, own columns).  Local."""
        scale = np.full(len(kept.sums), factor, kept.sums.dtype)
        if kept.weights is not None:
            scale *= kept.weights
        dlogits: Array = kept.exponentials * (scale / kept.sums)[:, None]
        dlogits[kept.here, kept.columns] -= scale[kept.here]
        return dlogits
