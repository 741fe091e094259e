"""A mixture of experts: each token goes to a few of many layers, which lie on different ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, get_args
from zlib import crc32

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, MeshError
from pdgemm.local.arrays.activations import Finish
from pdgemm.local.arrays.arguments import as_count, as_name, as_real
from pdgemm.names import Activation
from pdgemm.parallel.layers.array_checks import check_array
from pdgemm.parallel.layers.line_products import add_product, for_blas
from pdgemm.parallel.layers.router import OwnRuns, Routes, own_runs, routes_of, scores_gradient
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import of_host
from pdgemm.schedules.training.mesh_shape import EXPERTS
from pdgemm.schedules.training.token_exchange import (
    MICROBATCH,
    RUN_WORDS,
    TokenExchange,
    run_tables,
)
from pdgemm.support.text import counted
from pdgemm.transport.collectives import all_to_all, prepared_collective

Array = np.ndarray
_TAG = 0  # the message tag of collectives that begin and end in the same order on all ranks of a line
_MANY, _CUT = 2**32, 12  # more than a rank has runs; bits of 32 that a checksum beside their number leaves out
_QUIET = np.errstate(all="ignore")  # a warning may be an error, of the rank alone that computes
_NAMES = ("router", "w1", "b1", "w2", "b2")


@dataclass
class ExpertStatistics:
    """What happened to the tokens of microbatches whose backward passes have been computed: numbers of all ranks.

    tokens : the tokens.   loads : (experts), how many tokens chose each expert.   dropped : the choices that experts
    had no capacity for.   balance_loss : the sum of the terms that balance the experts.
    """

    experts: int
    tokens: int = 0
    dropped: int = 0
    balance_loss: float = 0.0
    loads: Array = field(init=False)

    def __post_init__(self) -> None:
        self.loads = np.zeros(self.experts, np.int64)

    @property
    def imbalance(self) -> float:
        """How many times the mean number of tokens the most loaded expert was chosen by."""
        total = int(self.loads.sum())
        return int(self.loads.max()) * self.experts / total if total else 1.0

    def __str__(self) -> str:
        return (
            f"{counted(self.tokens, 'token')}, {counted(self.dropped, 'choice')} dropped of {int(self.loads.sum())}; "
            f"the most loaded expert has {self.imbalance:.2f} times the mean; balance loss {self.balance_loss:.6g}"
        )

    def add(self, exchange: TokenExchange, balance_loss: float) -> None:
        """Add a microbatch."""
        self.tokens += exchange.tokens
        self.dropped += exchange.dropped
        self.loads += exchange.loads
        self.balance_loss += balance_loss


class ExpertsKept(NamedTuple):
    """What a forward pass keeps for the backward pass.

    taken : the choices of this rank's tokens that experts take, in the order of experts: n k numbers, token-major.
    inputs, aux, hidden : of this rank's experts, one below the other: (rows, h), (rows, f), (rows, f).
    results : of the experts for the taken choices, (choices, h).
    slope, balance_loss : of the balance loss, by the probabilities (experts), and its value.
    """

    x: Array
    routes: Routes
    exchange: TokenExchange
    taken: Array
    inputs: Array
    aux: Array
    hidden: Array
    results: Array
    slope: Array
    balance_loss: float


class ExpertsLater(NamedTuple):
    """What the gradients of the parameters are products of.

    dscores : (n, experts).   daux, dresults : gradients by `aux` and by results of this rank's experts.
    rows : of each of this rank's experts.
    """

    x: Array
    dscores: Array
    inputs: Array
    daux: Array
    hidden: Array
    dresults: Array
    rows: list[slice]


class Experts:
    """A mixture of experts on a mesh.  Collective over the mesh.

    ::

        y[t] = sum over the k experts e that token t chooses of g[t, e] f(x[t] w1[e] + b1[e]) w2[e] + b2[e]

        layer = Experts(mesh, experts=8, topk=2, capacity=1.25)
        y, kept = layer.forward(x, order, parameters, divisor)
        dx, later = layer.input_gradient(dy, kept, parameters)
        layer.weight_gradient(later, gradients)

    A token chooses the k experts with the largest scores x @ router, of equal ones the lower.  The weights g are the
    softmax of the scores, divided by its sum over the k (GShard), or the probability itself where k = 1 (Switch
    transformers): a quotient of 1 would leave the router without a gradient.  A microbatch has the tokens of all ranks
    along dp, cp and tp, of which an expert takes ceil(capacity tokens k / experts) at most, in the order of their
    global numbers: so the same tokens are dropped on any mesh.  A choice that is dropped adds nothing to y.

    mesh     : expert e is on the ranks of ep index e // (experts / ep); along edp, cp and tp there are copies of it.
    experts  : their number, which ep divides.   topk : k.   capacity : a factor, > 0; experts / k drops no token.
    activation : f, a name as of `Epilogue`.
    balance  : a factor of the loss balance * experts * sum_e f_e P_e, with the fraction f_e of choices that are e and
        the mean probability P_e, of all tokens of the microbatch.  A step's loss is a sum over tokens / divisor, so a
        microbatch adds its number of tokens / divisor times this.
    sequence : each rank along tp has tokens of its own, as it must.

    statistics : the `ExpertStatistics` since `reset_statistics`; a microbatch counts when `input_gradient` is computed.

    Cost on a rank: 4hf flops in the forward and 8hf in the backward pass for each token that comes to its experts.
    Each choice of an expert on another rank sends h words there and h back, in both passes ("experts" of
    `mesh.traffic`); all ranks of a microbatch learn the runs of tokens of each ("router").  `TokenExchange.traffic` has
    the words exactly.  Memory: 2h + 2f words for each token that comes, and h for each choice.
    Raises ArgumentError or MeshError on all ranks.
    Shazeer et al., arXiv:1701.06538, 2017; Lepikhin et al., GShard, arXiv:2006.16668, 2020; Fedus, Zoph & Shazeer,
    Switch transformers, Journal of Machine Learning Research 23, 2022.
    """

    def __init__(
        self,
        mesh: Mesh,
        experts: int,
        topk: int,
        capacity: float,
        *,
        activation: Activation = "gelu",
        balance: float = 0.01,
        sequence: bool = True,
    ) -> None:
        self.mesh, self._line, self._expert_line = mesh, mesh.line(MICROBATCH), mesh.line(EXPERTS)
        with mesh.checks(self._line).checked(set()) as arguments:
            self.experts, ep = as_count(experts, "experts", 1), mesh.shape.ep
            if self.experts % ep:
                known = [str(n) for n in range(1, mesh.shape.dp + 1) if not (self.experts % n or mesh.shape.dp % n)]
                raise MeshError(f"{self.experts} experts are not divided over ep {ep}: ep is one of {', '.join(known)}")
            self.topk = as_count(topk, "topk", 1)
            if self.topk > self.experts:
                raise ArgumentError(f"a token chooses 1 to {self.experts} different experts, got topk = {self.topk}")
            self.capacity, self.balance = as_real(capacity, "capacity", 0), as_real(balance, "balance")
            self.activation = as_name(activation, "activation", get_args(Activation))
            if not sequence and mesh.shape.tp > 1:
                raise MeshError(f"experts take sequence=True on {mesh.shape.sizes}: ranks along tp have other tokens")
            arguments += ["Experts", self.experts, self.topk, self.capacity, self.activation, self.balance]
        self._known = set[Any]()
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Begin `statistics` anew.  Local."""
        self.statistics = ExpertStatistics(self.experts)

    # ---------------------------------------------------------------- passes
    @_QUIET
    def forward(
        self, x: Array, order: Any, parameters: Mapping[str, Array], divisor: float
    ) -> tuple[Array, ExpertsKept]:
        """Return y, and what the backward pass needs.  Collective over the ranks of the microbatch.

        x          : (n, h), float32 or float64, the tokens of this rank; n >= 0 may differ between ranks.
        order      : (n), integers >= 0: the number of each token in the microbatch, on all ranks together.
        parameters : "router" (h, experts), "w1" (own experts, h, f), "b1" (own experts, f), "w2" (own experts, f, h),
                     "b2" (own experts, h); of 16 bits, they are converted to the type of x.
        divisor    : of the loss of the step, > 0, the same on all ranks.

        A second call computes the same bits.  Raises ArgumentError or DTypeError on all ranks of the microbatch, also
        where they have different divisors, h or types.
        """
        error: Exception | None = None
        try:
            numbers = self._checked(x, order, parameters, divisor)
            routes = routes_of(x, parameters["router"], self.topk)
            own = own_runs(numbers, routes.chosen, self.experts)
        except Exception as bad:
            error = bad
        probabilities = np.zeros(self.experts) if error else routes.probabilities.sum(axis=0, dtype=np.float64)
        same = "" if error else f"Experts.forward, divisor {float(divisor)}, {x.dtype}, h {x.shape[1]}"
        exchange, probabilities = self._agreed(None if error else own, probabilities, error, same)
        fractions = exchange.loads / max(1, exchange.tokens * self.topk)
        slope = self.balance * self.experts / divisor * fractions
        x, taken = for_blas(x, x.dtype), own.taken(exchange.kept[exchange.owner == self._line.rank])
        inputs = self._to_experts(x[taken // self.topk], exchange)
        aux, hidden, outputs = self._multiplied(inputs, exchange, parameters)
        results = self._to_tokens(outputs, exchange)
        y = _combined(results, taken, routes.gates)
        return y, ExpertsKept(
            x, routes, exchange, taken, inputs, aux, hidden, results, slope, float(slope @ probabilities)
        )

    @_QUIET
    def input_gradient(
        self, dy: Array, kept: ExpertsKept, parameters: Mapping[str, Array], scale: float = 1.0
    ) -> tuple[Array, ExpertsLater]:
        """Return the gradient by x, and what `weight_gradient` needs.  Collective over the rank's line along ep.

        dy : (n, h), the gradient by y.   scale : of the loss, by which dy is multiplied.
        Raises ArgumentError, DTypeError or LayoutError on all ranks of the line.
        """
        with self.mesh.checks(self._expert_line).checked(self._known) as arguments:
            gates, exchange, taken = kept.routes.gates, kept.exchange, kept.taken
            check_array("dy", dy, kept.x.shape, self._where)
            self._check_parameters(parameters, kept.x.shape[1])
            scale = as_real(scale, "scale")
            arguments += ["Experts.input_gradient", kept.x.shape[1], kept.x.dtype, scale]
        dy = dy.astype(kept.x.dtype, copy=False)
        sent, dgates = dy[taken // self.topk], np.zeros_like(gates)
        dgates.reshape(-1)[taken] = np.einsum("ij,ij->i", sent, kept.results)
        dscores = scores_gradient(kept.routes, dgates, scale * kept.slope)
        sent *= gates.reshape(-1)[taken, None]
        dresults = self._to_experts(sent, exchange)
        daux, dinputs = np.empty_like(kept.aux), np.empty_like(kept.inputs)
        for at, rows in enumerate(self._rows(exchange)):
            w1, w2 = (for_blas(parameters[name][at], dy.dtype) for name in ("w1", "w2"))
            add_product(self.mesh, dresults[rows], w2.T, 0, daux[rows])
            Finish(self.activation, True, aux=kept.aux[rows])(daux[rows], daux[rows])
            add_product(self.mesh, daux[rows], w1.T, 0, dinputs[rows])
        dx = _combined(self._to_tokens(dinputs, exchange), taken, np.ones_like(gates))
        dx += dscores @ parameters["router"].astype(dy.dtype, copy=False).T
        self.statistics.add(exchange, kept.balance_loss)
        return dx, ExpertsLater(kept.x, dscores, kept.inputs, daux, kept.hidden, dresults, self._rows(exchange))

    @_QUIET
    def weight_gradient(
        self,
        later: ExpertsLater,
        gradients: Mapping[str, Array],
        ready: Callable[[str], object] = lambda name: None,
    ) -> None:
        """Add the gradients of the parameters, of this rank's tokens and of those that came to its experts.  Local.

        gradients : arrays by the names of the parameters, in the type of x.  That of the router is one part for each
            rank along dp, cp and tp, those of experts one for each along edp, cp and tp; `Buckets` adds the parts.
        ready : is called with the name of each parameter when its gradient is complete, in the order of a backward
            pass: "b2", "w2", "b1", "w1", "router".  Each array is taken when it is needed, and not kept.
        """
        for last, inputs, outputs in (("2", later.hidden, later.dresults), ("1", later.inputs, later.daux)):
            gradient = gradients["b" + last]
            for at, rows in enumerate(later.rows):
                gradient[at] += outputs[rows].sum(axis=0)
            ready("b" + last)
            gradient = gradients["w" + last]
            for at, rows in enumerate(later.rows):
                add_product(self.mesh, inputs[rows].T, outputs[rows], 1, gradient[at])
            ready("w" + last)
        add_product(self.mesh, later.x.T, later.dscores, 1, gradients["router"])
        ready("router")

    # ---------------------------------------------------------------- routes
    def _checked(self, x: Any, order: Any, parameters: Mapping[str, Array], divisor: float) -> Array:
        """Return the numbers of the tokens.  Raises on this rank alone."""
        where = self._where
        as_real(divisor, "divisor", 0)
        if of_host(x, "x") is not x or x.ndim != 2 or x.dtype not in (np.float32, np.float64):
            kind = getattr(x, "dtype", type(x).__name__)
            raise DTypeError(f"x is (tokens, h) of float32 or float64, got {np.shape(x)} of {kind} {where}")
        n = len(x)
        self._check_parameters(parameters, x.shape[1])
        numbers = np.asarray(order)
        if numbers.shape != (n,) or (numbers.dtype.kind not in "iu" and n):
            raise ArgumentError(f"order has an integer for each of {n} tokens {where}, got {numbers.shape}")
        if n and numbers.min() < 0:
            raise ArgumentError(f"tokens have numbers >= 0, got {numbers.min()} {where}")
        return numbers.astype(np.int64)

    @property
    def _where(self) -> str:
        return f"on rank {self.mesh.rank} of {self.mesh.shape.sizes} of {counted(self.experts, 'expert')}"

    def _check_parameters(self, parameters: Mapping[str, Array], h: int) -> None:
        own, f = self.experts // self.mesh.shape.ep, np.shape(parameters["b1"])[-1:]
        for name, shape in zip(_NAMES, ((h, self.experts), (own, h, *f), (own, *f), (own, *f, h), (own, h))):
            check_array(name, parameters[name], shape, self._where)

    def _agreed(
        self, own: OwnRuns | None, probabilities: Array, error: Exception | None, arguments: str
    ) -> tuple[TokenExchange, Array]:
        """Return the ways of all tokens, and the sums of probabilities over them.  Collective over the microbatch.

        Raises on all ranks what is wrong on one of them, and ArgumentError where their arguments differ.
        """
        line, mesh, counted = self._line, self.mesh, self.mesh.traffic["router"]
        mine = np.zeros(line.size)
        mine[line.rank] = (0 if own is None else len(own.first)) + _MANY * (crc32(arguments.encode()) >> _CUT)
        probabilities, runs, failures = mesh.sum(
            probabilities, mine, float(error is not None), axis=MICROBATCH, kind="router"
        )
        checksums, runs = np.divmod(runs.astype(np.int64), _MANY)
        if failures or (checksums != checksums[0]).any():
            mesh.checks(line).agree(error, arguments)
        assert own is not None
        tables = run_tables(runs, self.experts)
        table = np.empty((int(runs.sum()), RUN_WORDS + self.experts), np.int64)
        first = int(runs[: line.rank].sum())
        table[first : first + len(own.first)] = own.table
        checks = mesh.checks(line)
        start = prepared_collective(tables, checks.messages, table.reshape(-1), checks.tag(_TAG))
        mesh.wait([start(counted)], line)
        owner = np.repeat(np.arange(line.size), runs)
        exchange = TokenExchange(
            mesh.shape, self.topk, self.capacity, owner, table[:, 0], table[:, 1], table[:, RUN_WORDS:]
        )
        return exchange, probabilities

    # ---------------------------------------------------------------- tokens
    def _rows(self, exchange: TokenExchange) -> list[slice]:
        """Return the rows of each of this rank's experts in an array of the tokens that came to them."""
        ends = np.cumsum([0, *exchange.arriving(self.mesh.rank).sum(axis=0)]).tolist()
        return [slice(*span) for span in pairwise(ends)]

    def _multiplied(
        self, inputs: Array, exchange: TokenExchange, parameters: Mapping[str, Array]
    ) -> tuple[Array, Array, Array]:
        """Return what the activation is applied to, its values, and the results of this rank's experts.  Local."""
        kind, f = inputs.dtype, parameters["b1"].shape[1]
        aux, hidden, outputs = np.empty((len(inputs), f), kind), np.empty((len(inputs), f), kind), np.empty_like(inputs)
        for at, rows in enumerate(self._rows(exchange)):
            w1, w2 = (for_blas(parameters[name][at], kind) for name in ("w1", "w2"))
            b1, b2 = (parameters[name][at].astype(kind, copy=False) for name in ("b1", "b2"))
            add_product(self.mesh, inputs[rows], w1, 0, hidden[rows])
            Finish(self.activation, bias=b1[None], aux=aux[rows])(hidden[rows], hidden[rows])
            add_product(self.mesh, hidden[rows], w2, 0, outputs[rows])
            outputs[rows] += b2
        return aux, hidden, outputs

    def _to_experts(self, rows: Array, exchange: TokenExchange) -> Array:
        """Return the rows for this rank's experts, expert by expert, from rows in the order of all experts."""
        if self.mesh.shape.ep == 1:
            return rows
        own = exchange.rows[self._line.rank].reshape(self.mesh.shape.ep, -1).sum(axis=1)
        parts = np.split(rows, np.cumsum(own)[:-1])
        arrived = self._exchanged(parts, exchange, back=False)
        arriving = exchange.arriving(self.mesh.rank)
        cuts = [np.split(part, np.cumsum(counts)[:-1]) for part, counts in zip(arrived, arriving)]
        return np.concatenate([cut[at] for at in range(arriving.shape[1]) for cut in cuts])

    def _to_tokens(self, rows: Array, exchange: TokenExchange) -> Array:
        """Return rows of experts to the ranks that they came from; the inverse of `_to_experts`."""
        if self.mesh.shape.ep == 1:
            return rows
        arriving = exchange.arriving(self.mesh.rank)
        pieces = np.split(rows, np.cumsum(arriving.T)[:-1])  # expert by expert, and in each rank by rank
        parts = [np.concatenate(pieces[at :: self.mesh.shape.ep]) for at in range(self.mesh.shape.ep)]
        return np.concatenate(self._exchanged(parts, exchange, back=True))

    def _exchanged(self, parts: list[Array], exchange: TokenExchange, back: bool) -> list[Array]:
        """Send a part to each rank of the ep line, and return the parts that come from them."""
        h, kind, mesh, line = parts[0].shape[1], parts[0].dtype, self.mesh, self._expert_line
        arrived = all_to_all(
            exchange.exchange(mesh.rank, h, kind, back),
            mesh.checks(line).messages,
            [part.reshape(-1) for part in parts],
            mesh.traffic["experts"],
            lambda group: mesh.wait(group, line),
            mesh.checks(line).tag(_TAG),
        )
        return [x.reshape(-1, h) for x in arrived]


def _combined(rows: Array, taken: Array, weights: Array) -> Array:
    """Return y[t] = sum_j weights[t, j] rows[i], where i is the place of choice t k + j in `taken`.  (tokens, h)"""
    n, topk = weights.shape
    y, place = np.zeros((n, rows.shape[1]), rows.dtype), np.full(n * topk, -1)
    place[taken] = np.arange(len(taken))
    for choice, weight in zip(place.reshape(n, topk).T, weights.T):
        tokens = np.flatnonzero(choice >= 0)
        y[tokens] += weight[tokens, None] * rows[choice[tokens]]
    return y
