"""Linear layers whose weights are divided along tp: forward, and both products of the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, get_args

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.grids.layout import Order
from pdgemm.local.arrays.activations import Finish
from pdgemm.local.arrays.arguments import as_count, as_name
from pdgemm.names import Activation, AlgorithmName
from pdgemm.parallel.layers.array_checks import check_array
from pdgemm.parallel.layers.line_collectives import line_collectives
from pdgemm.parallel.layers.line_products import Divided, add_product, for_blas, line_products
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.training.linear_schedule import LinearSchedule, LinearStep, WeightSplit
from pdgemm.support.agreement import together

Array = np.ndarray
_ALGORITHMS: dict[WeightSplit, AlgorithmName] = {"columns": "allgather", "rows": "reduce_scatter"}  # of forward passes


class Linear:
    """Y = f(X W + b) + R of T rows, with W (d_in, d_out) divided along tp.  Collective over the line of tp.

    ::

        up, down = Linear(mesh, h, 4 * h, "columns"), Linear(mesh, 4 * h, h, "rows")
        y, aux = up.forward(x, w1, b1, "gelu", tokens=T)         # x (own rows, h); y (T, own columns)
        z, _ = down.forward(y, w2, b2, residual=x)               # z (own rows, h)

        dy, dz = down.input_gradient(dz, w2, "gelu", aux)        # times gelu'(aux); dz is gathered once
        down.weight_gradient(dz, y, dw2, db2)
        dx, dy = up.input_gradient(dy, w1)
        up.weight_gradient(dy, x, dw1, db1)

    split : "columns": of W, b and Y; or "rows" of W, with the columns of X; blocks of ceil(n/t).
    sequence : the other one of X and Y is divided by rows, in blocks of ceil(T/t); False: it is whole on each rank.

    ========  ============================  ==================  =========================  =============
    split     x                             w                   y, residual                bias
    ========  ============================  ==================  =========================  =============
    columns   (own rows | T, d_in)          (d_in, own columns) (T, own columns)           (own columns,)
    rows      (T, own columns)              (own rows, d_out)   (own rows | T, d_out)      (d_out,)
    ========  ============================  ==================  =========================  =============

    Parameters are float16, bfloat16, float32 or float64; all else is float64 where they are, else float32.  Arguments
    are not changed.  Each rank computes the whole gradient of the bias of "rows", so it is a parameter without tp.

    With `sequence`, rows are gathered, or sums are added up, in place on a node.  Between two ranks on two nodes this
    goes on while other rows are multiplied, and between more ranks products are those of `docs/tensor_parallel.md`,
    whose panels travel while others are multiplied: each begins when all ranks of the line have come to it, which an
    all-reduce of one word tells (`mesh.traffic["decisions"]`).  Buffers are kept, and serve all layers.
    Words, exactly: `LinearSchedule`, counted in `mesh.traffic["tensor"]`.   2 T d_in d_out/t flops for each of forward,
    input gradient and weight gradient; memory for T d_in or T d_out words beside the result.
    Raises ArgumentError or LayoutError on all ranks of the line, for each T before it is used first.
    """

    def __init__(self, mesh: Mesh, d_in: int, d_out: int, split: WeightSplit = "columns", *, sequence: bool = True):
        self._mesh, line = mesh, mesh.line("tp")
        with mesh.checks(line).checked(set()) as arguments:
            self.split: WeightSplit = as_name(split, "split", get_args(WeightSplit))  # type: ignore[assignment]
            self.d_in, self.d_out = as_count(d_in, "d_in", 0), as_count(d_out, "d_out", 0)
            self.sequence = bool(sequence)
            arguments += ["Linear", self.split, self.d_in, self.d_out, self.sequence]
        self._comm, self._index, self._ranks = line.comm, line.rank, tuple(range(line.size))
        self._multiply, self._line = line_products(mesh, "tp", "tensor"), line_collectives(mesh, "tp", "tensor")
        self._schedules = dict[tuple[int, np.dtype], LinearSchedule]()
        self._known, self._before = set[Any](), (0, 0)  # of the call before: T, and how often ranks had failed
        self._orders = dict[str, Order]()

    def schedule(self, tokens: int, dtype: Any) -> LinearSchedule:
        """Return what each step moves for T rows of a type.  Local."""
        how = self.split, self.sequence, tokens, self.d_in, self.d_out, np.dtype(dtype), self._ranks
        return LinearSchedule(*how)

    def forward(
        self,
        x: Array,
        w: Array,
        bias: Array | None = None,
        activation: Activation | None = None,
        residual: Array | None = None,
        *,
        tokens: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Return y = f(x w + bias) + residual, and x w + bias where there is an activation f.  Collective.

        tokens : T, the same on all ranks of the line; None: the rows of x, or where x has own rows alone, the T of the
            call before.  Where T varies between microbatches, pass it.
        """
        s = self._schedule(
            "x", tokens, {"x": x, "w": w, **({} if residual is None else {"y": residual})}, bias, activation
        )
        wide = s.dtype
        x = np.ascontiguousarray(x, wide)
        if self._by_panels:
            y, algorithm = np.empty(s.shapes(self._index)["y"], wide), _ALGORITHMS[self.split]
            self._multiply(algorithm, self._x(s, x), self._w(s, w), self._y(s, y))
        else:
            y, _ = self._product(s, "forward", x, for_blas(w, wide))
        return _finished(y, bias, activation, residual)

    def input_gradient(
        self,
        dy: Array,
        w: Array,
        activation: Activation | None = None,
        aux: Array | None = None,
        *,
        tokens: int | None = None,
    ) -> tuple[Array, Array]:
        """Return dx = (dy w^T) f'(aux), and what `weight_gradient` takes: dy, of "rows" that of all ranks.  Collective.

        activation, aux : f of the layer before, and what it was applied to, of the shape of x; None: no factor.
        tokens : as of `forward`; None: the rows of aux, if it has all.
        """
        if tokens is None and self.split == "rows" and isinstance(aux, np.ndarray) and aux.ndim:
            tokens = len(aux)
        needed = {"y": dy, "w": w, **({} if aux is None and activation is None else {"aux": aux})}
        s = self._schedule("y", tokens, needed, None, activation)
        wide = s.dtype
        dy = np.ascontiguousarray(dy, wide)
        if self._by_panels and self.split == "columns":  # of "rows", dy is gathered once for both products
            dx, later = np.empty(s.shapes(self._index)["x"], wide), dy
            self._multiply("reduce_scatter", self._y(s, dy), self._w(s, w).T, self._x(s, dx))
        else:
            dx, later = self._product(s, "input_gradient", dy, for_blas(w, wide).T)
        if activation is not None:
            Finish(activation, True, aux=np.asarray(aux))(dx, dx)
        return dx, later

    def weight_gradient(self, later: Array, x: Array, dw: Array, db: Array | None = None) -> None:
        """Add x^T dy to dw, this rank's part, and the sums of the columns of dy to db.  Collective.

        later : as `input_gradient` returned it.   x : as of `forward`.   dw, db : of the shapes of w and bias.
        """
        s = self._schedule("later", None, {"later": later, "x": x, "dw": dw}, db, None)
        x = np.ascontiguousarray(x, dw.dtype)
        if self._by_panels and self.split == "columns":
            self._multiply("allgather", self._x(s, x).T, self._y(s, later), self._w(s, dw, "dw"), beta=1)
        else:
            parts = self._arriving(s, x) if s.collective("weight_gradient") else [(x, slice(0, s.tokens))]
            for whole, part in parts:
                add_product(self._mesh, whole[part].T, later[part], 1, dw)
        if db is not None:
            db += later.sum(axis=0)

    # ---------------------------------------------------------------- the products
    @property
    def _travels(self) -> bool:
        """Do rows of X and Y travel?"""
        return self.sequence and len(self._ranks) > 1

    @property
    def _by_panels(self) -> bool:
        """Do they travel panel by panel?  On a node little can be hidden; two ranks hide it behind own rows."""
        return self._travels and not self._line.in_place and len(self._ranks) > 2

    def _product(self, s: LinearSchedule, step: LinearStep, a: Array, b: Array) -> tuple[Array, Array]:
        """Return a b and a, of all rows where the step gathers a; where it adds up, the sums over the line."""
        collective = s.collective(step)
        operation, shape = collective.operation if collective else "", (s.tokens, b.shape[1])
        if operation == "reduce_scatter":
            return self._own_sums(s, a, b), a
        if operation == "all_reduce":
            addends = self._line.addends(shape, a.dtype)
            add_product(self._mesh, a, b, 0, addends)
            return self._line.sums(addends, s.rows), a
        c = np.empty(shape, a.dtype)
        for whole, part in self._arriving(s, a) if operation else [(a, slice(0, s.tokens))]:
            a = whole
            add_product(self._mesh, a[part], b, 0, c[part])
        return c, a

    def _arriving(self, s: LinearSchedule, x: Array) -> Iterator[tuple[Array, slice]]:
        """Yield all rows of x, and which of them are there: where rows are sent, the own ones before they have come."""
        whole, coming = self._line.start_gather(x, s.rows)
        own = s.block(s.tokens, self._index)
        if self._line.in_place:
            self._line.wait(coming)
            yield whole, slice(0, s.tokens)
            return
        yield whole, own
        self._line.wait(coming)
        yield whole, slice(0, own.start)
        yield whole, slice(own.stop, s.tokens)

    def _own_sums(self, s: LinearSchedule, a: Array, b: Array) -> Array:
        """Return the sums of a b for the own rows; where addends are sent, those for other ranks are formed first."""
        addends, own = self._line.addends((s.tokens, b.shape[1]), a.dtype), s.block(s.tokens, self._index)
        if self._line.in_place:
            add_product(self._mesh, a, b, 0, addends)
            return self._line.own_sums(addends, s.rows)
        for part in (slice(0, own.start), slice(own.stop, s.tokens)):
            add_product(self._mesh, a[part], b, 0, addends[part])
        addends[own] = 0
        coming, mine = self._line.start_own_sums(addends, s.rows), np.empty_like(addends[own])
        add_product(self._mesh, a[own], b, 0, mine)
        self._line.wait(coming)
        mine += addends[own]
        return mine

    def _x(self, s: LinearSchedule, x: Array) -> Divided:
        return Divided(x, (s.tokens, s.d_in), "rows" if self.split == "columns" else "columns")

    def _y(self, s: LinearSchedule, y: Array) -> Divided:
        return Divided(y, (s.tokens, s.d_out), self.split)

    def _w(self, s: LinearSchedule, w: Array, name: str = "w") -> Divided:
        """Return the weights, or their gradient, in the memory order that all ranks have: W may be a view E^T."""
        if name not in self._orders:
            self._line.checks.meet()
            with (agreed := together(self._comm)) as arguments:
                arguments.append(f"the memory order of {name}")
                agreed.flag = w.flags.f_contiguous and not w.flags.c_contiguous
            self._orders[name] = "F" if agreed.flag else "C"
            with together(self._comm):
                self._check_order(name, w)
        order = self._orders[name]
        return Divided(np.asarray(w, s.dtype, order), (s.d_in, s.d_out), self.split, order)

    def _check_order(self, name: str, w: Array) -> None:
        """Raise LayoutError where a gradient, which is added to in place, has another memory order than agreed."""
        if name == "dw" and name in self._orders and np.asarray(w, order=self._orders[name]) is not w:
            raise LayoutError(f"dw has another memory order than in calls before, or on other ranks, {self._where}")

    # ---------------------------------------------------------------- arguments
    def _schedule(
        self,
        rows: str,
        tokens: int | None,
        arrays: dict[str, Any],
        bias: Array | None,
        activation: str | None,
    ) -> LinearSchedule:
        """Return the schedule after comparing the shapes of arrays with it; the ranks agree where T is new.

        rows : the name of the array whose rows are T if it has all of them, where `tokens` is None.
        """
        own_rows = self._travels and rows == ("x" if self.split == "columns" else "y")
        failures = self._line.checks.failures
        with self._line.checked(self._known) as arguments:
            weights = "dw" if "dw" in arrays else "w"
            for name in (weights, rows):
                check_array(name, arrays[name], (None, None), self._where)
            if tokens is None:
                before, then = self._before
                if own_rows and (not self._known or then != failures):
                    raise ArgumentError("tokens: where a rank has own rows alone, their number does not say T; pass it")
                tokens = before if own_rows else len(arrays[rows])
            kind = arrays[weights].dtype
            wide = kind if weights == "dw" else np.result_type(kind, np.float32)
            s = self._schedules.get((tokens, wide)) or self.schedule(as_count(tokens, "tokens", 0), wide)
            if activation is not None:
                as_name(activation, "activation", get_args(Activation))
            shapes, where = s.shapes(self._index), f"{self._where}, for {tokens} rows"
            shapes |= {"aux": shapes["x"], "dw": shapes["w"], "later": (tokens, shapes["y"][1])}
            for name, x in arrays.items():
                check_array(name, x, shapes[name], where)
            if bias is not None:
                check_array("bias" if weights == "w" else "db", bias, shapes["w"][1:], where)
            if weights == "dw":
                for name, x in (("later", arrays["later"]), *([("db", bias)] if bias is not None else [])):
                    if x.dtype != wide:
                        raise DTypeError(f"{name} is of {x.dtype}, and dw of {wide} {where}")
                self._check_order("dw", arrays["dw"])
            arguments += ["Linear", tokens, wide, f"{rows} of {self.d_in} x {self.d_out}", activation]
        self._schedules[tokens, wide], self._before = s, (tokens, failures)
        return s

    @cached_property
    def _where(self) -> str:
        """This rank, and the layer, as text."""
        layer = f"{self.d_in} x {self.d_out} by {self.split}, {'with' if self.sequence else 'without'} sequence"
        return f"on {self._line.where} of a layer {layer}"


def _finished(
    y: Array, bias: Array | None, activation: Activation | None, residual: Array | None
) -> tuple[Array, Array | None]:
    """Return f(y + bias) + residual, in place, and what f was applied to."""
    aux = None if activation is None else np.empty_like(y)
    if bias is not None or activation is not None or residual is not None:
        Finish(activation or "", False, None, None if bias is None else bias[None, :], residual, aux)(y, y)
    return y, aux
