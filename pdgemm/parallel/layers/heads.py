"""The heads of attention that a rank along tp has, in the columns of one projection for queries, keys and values."""

from __future__ import annotations

import numpy as np

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.parallel.layers.array_checks import check_array
from pdgemm.parallel.mesh import Mesh

Array = np.ndarray


class HeadSplit:
    """The heads of attention of a rank: heads/tp of queries, and kv_heads/tp of keys and values.  Collective.

    size : the length d of a head.

    Queries, keys and values are one product of a `Linear` layer by columns, so that the input is gathered once.  Its
    columns are groups, one for each head of keys: the heads of queries that it serves, its keys and its values.  So a
    rank's block of columns has whole groups, and the same weights have the same meaning for any tp.

    heads, kv_heads : of this rank.   columns : (heads + 2 kv_heads) d of all ranks, the outputs of the layer.
    Raises MeshError on all ranks of the line where tp does not divide heads and kv_heads.  Methods are local, and raise
    ArgumentError, DTypeError or LayoutError on this rank.
    """

    def __init__(self, mesh: Mesh, heads: int, kv_heads: int, size: int) -> None:
        ranks = mesh.length("tp")
        with mesh.checks(mesh.line("tp")).checked(set()) as arguments:
            heads, kv_heads, self.size = as_count(heads, "heads", 1), as_count(kv_heads, "kv_heads", 1), size
            if heads % kv_heads:
                raise ArgumentError(f"{kv_heads} heads of keys and values do not divide {heads} heads of queries")
            if kv_heads % ranks:  # and then heads, which they divide
                possible = [t for t in range(1, kv_heads + 1) if kv_heads % t == 0]
                raise MeshError(
                    f"{heads} heads with {kv_heads} of keys and values on tp {ranks} ranks: tp divides the heads, and "
                    f"may be {', '.join(map(str, possible))}"
                )
            arguments += ["HeadSplit", heads, kv_heads, as_count(size, "size", 1)]
        self.columns = (heads + 2 * kv_heads) * size
        self.heads, self.kv_heads = heads // ranks, kv_heads // ranks
        self._where = f"of {heads} heads with {kv_heads} of keys and values on rank {mesh.rank} of {mesh.shape.sizes}"

    def split(self, projected: Array, samples: int) -> tuple[Array, Array, Array]:
        """Return q (b, heads, s, d), and k and v (b, kv_heads, s, d), of a product (T, own columns).  Local.

        samples : b; T = b s rows, the positions of a sample one after the other.
        """
        served = self.heads // self.kv_heads
        x = self._by_sample("projected", projected, samples, (self.heads + 2 * self.kv_heads) * self.size)
        x = x.reshape(*x.shape[:2], self.kv_heads, served + 2, self.size)
        x = x.transpose(0, 2, 3, 1, 4)
        q = x[:, :, :served].reshape(samples, self.heads, x.shape[3], self.size)
        return q, x[:, :, served], x[:, :, served + 1]

    def joined(self, dq: Array, dk: Array, dv: Array) -> Array:
        """Return (T, own columns) of dq, dk and dv, as `split` returned q, k and v.  Local."""
        for name, x, heads in (("dq", dq, self.heads), ("dk", dk, self.kv_heads), ("dv", dv, self.kv_heads)):
            check_array(name, x, (*np.shape(dq)[:1], heads, *np.shape(dq)[2:3], self.size), self._where)
        b, _, positions, d = dq.shape
        served = self.heads // self.kv_heads
        x = np.empty((b, positions, self.kv_heads, served + 2, d), dq.dtype)
        by_group = x.transpose(0, 2, 3, 1, 4)
        by_group[:, :, :-2] = dq.reshape(b, self.kv_heads, served, positions, d)
        by_group[:, :, -2], by_group[:, :, -1] = dk, dv
        return x.reshape(b * positions, (self.heads + 2 * self.kv_heads) * d)

    def rows(self, out: Array) -> Array:
        """Return (T, heads d) of the result of attention, (b, heads, s, d).  Local."""
        check_array("out", out, (None, self.heads, None, self.size), self._where)
        b, heads, positions, d = out.shape
        return out.transpose(0, 2, 1, 3).reshape(b * positions, heads * d)

    def by_head(self, rows: Array, samples: int) -> Array:
        """Return (b, heads, s, d) of (T, heads d): the transpose of `rows`.  Local."""
        x = self._by_sample("rows", rows, samples, self.heads * self.size)
        return x.reshape(*x.shape[:2], self.heads, self.size).transpose(0, 2, 1, 3)

    def _by_sample(self, name: str, rows: Array, samples: int, columns: int) -> Array:
        check_array(name, rows, (None, columns), self._where)
        if len(rows) % as_count(samples, "samples", 1):
            raise ArgumentError(f"{len(rows)} rows are not those of {samples} samples of as many positions each")
        return rows.reshape(samples, len(rows) // samples, rows.shape[1])
