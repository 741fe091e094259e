"""Batched products: stacks and lists of any type, op and scalars, each item compared with NumPy's."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fake_device import fake_device
from hypothesis import example, given, settings, strategies as st
from mpi4py import MPI
from problems import SHAPES, op
from stored_files import refused
from tiers import examples, in_turn

from pdgemm import Batch, Epilogue, balance, batched, matmul_batched
from pdgemm.batched import CHUNK_BYTES
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, PdgemmError
from pdgemm.local.arrays import dtypes
from pdgemm.matrix import batch

pytestmark = pytest.mark.mpi

MNK = [mnk for group in SHAPES.values() for mnk in group]
TYPES = [  # (types of A, of B, of C, of sums)
    *((x, x, x, None) for x in ("float32", "float64", "complex64", "complex128", "float16", "bfloat16")),
    ("int8", "int8", "int32", None),
    ("int8", "float32", "float64", None),
    ("int8", "int8", "float32", None),
    ("float16", "float16", "float32", None),
    ("bfloat16", "bfloat16", "bfloat16", "float64"),
    ("float32", "complex64", "complex128", None),
    ("float64", "float64", "float32", "float32"),
]
Sizes = Sequence[tuple[int, int, int]]


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, trans: str = "N") -> np.ndarray:
    """Return a random matrix whose op has the given shape; integers are drawn from the whole range of int8."""
    shape, dtype = shape if trans == "N" else shape[::-1], np.dtype(dtype)
    if dtype.kind == "i":
        return rng.integers(-128, 128, shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def check_items(
    alpha: Any, A: Any, B: Any, beta: Any, C0: Any, result: Any, dtype: Any, accumulate: Any, ops: str = "NN"
) -> None:
    """Check |C - C^| <= (k + 4) eps (|alpha| |A| |B| + |beta| |C0|) + 2 eps(C) |C^| for each element; C^ is exact.

    Higham 2002, 3.5 and 3.6; for complex numbers times 2 sqrt 2.  Integers are exact modulo 2^32.
    """
    for a, b, c0, c in zip(A, B, C0, result, strict=True):
        assert c.dtype == dtype
        a, b = op(a, ops[0]), op(b, ops[1])
        if dtype.kind == "i":
            exact = alpha * (a.astype(np.int64) @ b.astype(np.int64)) + beta * c0.astype(np.int64)
            assert np.array_equal(c, exact.astype(np.int32))
            continue
        a, b, c0, c = (x.astype("D") for x in (a, b, c0, c))
        exact = alpha * (a @ b) + (beta * c0 if beta else 0)
        size = abs(alpha) * (abs(a) @ abs(b)) + (abs(beta) * abs(c0) if beta else 0)
        factor = 2 * np.sqrt(2) if dtype.kind == "c" else 1
        bound = factor * ((a.shape[1] + 4) * dtypes.eps(accumulate) * size + 2 * dtypes.eps(dtype) * abs(exact))
        assert (abs(c - exact) <= bound).all()


def check_batch(
    comm: Any, sizes: Sizes, types: Any = TYPES[1], ops: Any = "NN", alpha: complex = 1, beta: complex = 0,
    owner: Any = None, seed: int = 0, fresh: bool = False,
) -> None:  # fmt: skip
    """Check one batched product with items of `sizes`, (m, n, k) each.   fresh : the product creates C."""
    rng = np.random.default_rng(seed)
    a_type, b_type, c_type = map(np.dtype, types[:3])
    wide = dtypes.arithmetic(a_type, b_type, c_type) if types[3] is None else np.dtype(types[3])
    a = [draw(rng, (m, k), a_type, ops[0]) for m, _, k in sizes]
    b = [draw(rng, (k, n), b_type, ops[1]) for _, n, k in sizes]
    c = [draw(rng, (m, n), c_type) for m, n, _ in sizes]
    owner = balance(sizes, comm.size) if owner == "balance" else owner
    if not sizes:  # without items, an array determines the type
        a, b, c = (np.zeros((0, 2, 2), x) for x in (a_type, b_type, c_type))  # type: ignore[assignment]
    A, B, C = (Batch.from_global(x, comm, owner) for x in (a, b, c))
    not_read = [*C.items] if beta == 0 and c_type.kind != "i" else []
    not_read += [*A.items, *B.items] if alpha == 0 and a_type.kind != "i" != b_type.kind else []
    for x in not_read:
        x[...] = np.nan
    before = [np.array(x) for batch in (A, B) for x in batch.items]

    options = {"alpha": alpha, "beta": beta, "transa": ops[0], "transb": ops[1], "accumulate_dtype": types[3]}
    result: Any = matmul_batched(A, B, None if fresh else C, **options)
    assert (fresh or result is C) and len(result) == len(sizes)
    assert isinstance(result.items, np.ndarray) == (len({mnk[:2] for mnk in sizes}) <= 1)
    assert np.array_equal(result.owner, A.owner)
    for x, old in zip([*A.items, *B.items], before, strict=True):
        assert np.array_equal(x, old, equal_nan=bool(alpha == 0))
    beta, mine = 0 if fresh else beta, np.flatnonzero(result.owner == comm.rank)
    own_a, own_b, own_c = ([x[number] for number in mine] for x in (a, b, c))
    check_items(alpha, own_a, own_b, beta, own_c, result.items, result.dtype, wide, ops)
    check_report(result, sizes, 8 if wide.kind == "c" else 2, alpha, comm)
    whole = result.to_global(root=seed % comm.size)
    assert (whole is None) == (comm.rank != seed % comm.size)
    if whole is not None:
        check_items(alpha, a, b, beta, c, whole, result.dtype, wide, ops)


def check_report(result: Any, sizes: Sizes, each: int, alpha: complex, comm: Any) -> None:
    flops = [each * m * n * k * (alpha != 0) for m, n, k in sizes]
    load = [sum(x for x, part in zip(flops, result.owner) if part == rank) for rank in range(comm.size)]
    report = result.report
    assert (report.items, report.flops, report.local_flops) == (len(sizes), sum(flops), load[comm.rank])
    assert report.imbalance == pytest.approx(max(load) * comm.size / sum(load) if sum(load) else 1)
    assert report.seconds > 0


# ------------------------------------------------------------------ products
def test_stacks_of_several_chunks_and_items_larger_than_a_chunk(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn, chunk in enumerate((1, 2000, 5000)):
        monkeypatch.setattr(batched, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(batched, "LARGE_BYTES", chunk // 2)
        for types, (alpha, beta, ops) in in_turn(TYPES, [(1, 0, "NN"), (2, 3, "CT"), (0, 2, "NN")], start=turn):
            check_batch(comm, [(6, 5, 7)] * 11, types, ops, alpha, beta)


@pytest.mark.parametrize("dtype", ["float16", "int8", "complex64"])
def test_stacks_are_converted_chunk_by_chunk(comm: Any, dtype: str) -> None:
    A = Batch.from_local(np.ones((4000, 16, 16), dtype), comm)
    C = Batch.from_local(np.ones(A.items.shape, {"int8": "int32"}.get(dtype, dtype)), comm)
    tracemalloc.start()
    matmul_batched(A, A, C, alpha=2, beta=1, transb="C")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (C.items == 33).all()
    assert peak < CHUNK_BYTES + 200 * len(A)  # a chunk, and 200 bytes per item


def test_whole_numbers_are_exact_beyond_the_width_of_float32(comm: Any) -> None:
    """2^14 k exceeds the integers that float32 represents, from k = 1025 on."""
    for k in (1024, 1025, 2**17):  # 2^17 2^14 = 2^31 is -2^31 in int32
        A = Batch.from_global(np.full((2, 1, k), -128, np.int8), comm)
        B = Batch.from_global(np.full((2, k, 1), -128, np.int8), comm)
        assert (np.asarray(matmul_batched(A, B).items) == (k * 2**14 + 2**31) % 2**32 - 2**31).all()
        check_batch(comm, [(3, 2, k)] * 2, TYPES[6], alpha=-3, beta=5)


def test_local_matrices_are_adopted_in_either_order(comm: Any) -> None:
    rng = np.random.default_rng(comm.rank)
    count = 3 * (comm.rank % 2) + 1
    a, b = rng.standard_normal((count, 4, 3)), rng.standard_normal((count, 5, 4))
    A, B = Batch.from_local(a, comm), Batch.from_local(b.swapaxes(1, 2), comm)
    assert np.shares_memory(A.items, a) and np.shares_memory(B.items, b)
    assert A.shapes.tolist() == [[4, 3]] * len(A)
    assert A.owner.tolist() == [rank for rank in range(comm.size) for _ in range(3 * (rank % 2) + 1)]
    c = np.full((count, 5, 3), np.nan).swapaxes(1, 2)
    for alpha, beta in [(1, 0), (2, 1)]:
        old = c.copy()
        matmul_batched(A, B, Batch.from_local(c, comm), alpha=alpha, beta=beta, transa="T")
        check_items(alpha, a, b.swapaxes(1, 2), beta, old, c, c.dtype, c.dtype, "TN")
    for single in A.owner, A.shapes:
        with pytest.raises(ValueError, match="read-only"):
            single[:1] = 0


def test_lists_of_equal_shapes_become_stacks(comm: Any) -> None:
    x = np.arange(6, dtype="f4").reshape(2, 3)
    own = [x + rank for rank in range(comm.rank)]  # rank 0 has no item, and no type
    batch = Batch.from_local(own, comm)
    assert batch.items.shape == ((comm.rank, 2, 3) if comm.size > 1 else (0, 0, 0))
    assert batch.dtype == ("f4" if comm.size > 1 else "f8")
    assert (batch.items == np.reshape(own, batch.items.shape)).all()
    mixed = Batch.from_local(x[None, : comm.rank], comm)  # stacks whose shape differs among ranks
    assert isinstance(mixed.items, list) == (comm.size > 1)
    whole = mixed.to_global()
    if comm.rank == 0:
        assert [y.shape for y in whole] == [(min(2, rank), 3) for rank in range(comm.size)]


def test_large_arrays_are_sent_in_pieces(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PIECE_BYTES", 64)
    for types, sizes in in_turn(TYPES, ([(5, 7, 3)] * 6, MNK[:9])):
        check_batch(comm, sizes, types, owner="balance")


size = st.integers(0, 9)
mnk = st.tuples(size, size, size)


@pytest.mark.parametrize("types", TYPES, ids=str)
@settings(max_examples=examples(40))
@given(
    sizes=st.lists(mnk | st.sampled_from(MNK), max_size=9) | st.builds(lambda x, n: [x] * n, mnk, st.integers(0, 40)),
    ops=st.sampled_from(["NN", "NT", "NC", "TN", "TT", "TC", "CN", "CT", "CC"]),
    scalars=st.tuples(st.sampled_from([1, 2, -3, 0, "odd"]), st.sampled_from([0, 1, 2, -1, "odd"])),
    owner=st.sampled_from([None, "balance", "first", "last", "any"]),
    fresh=st.booleans(),
    seed=st.integers(0, 99),
)
@example(MNK, "TC", (1, 0), "balance", True, 1)
@example([(3, 4, k) for k in range(9)], "NN", (2, 1), "balance", False, 2)  # C is a stack, A and B are lists
@example([], "NN", (1, 2), None, False, 3)
@example([(2, 3, 4)], "NN", ("odd", "odd"), "last", False, 4)
@example([(5, 4, 7)] * 9, "CT", ("odd", "odd"), None, False, 5)
def test_any_batch(
    comm: Any, types: tuple[Any, ...], sizes: Any, ops: str, scalars: Any, owner: Any, fresh: bool, seed: int
) -> None:
    kind = np.dtype(types[2]).kind
    odd = {"i": (2**33 + 3, -(2**31)), "c": (1 + 2j, 3j)}.get(kind, (-0.5, 0.25))
    alpha, beta = (y if x == "odd" else x for x, y in zip(scalars, odd))
    owners = {"first": [0] * len(sizes), "last": [comm.size - 1] * len(sizes)}
    owners["any"] = np.random.default_rng(seed).integers(0, comm.size, len(sizes)).tolist()
    fresh = fresh and (types[2] == types[0] or types[2] == "int32")
    check_batch(comm, sizes, types, ops, alpha, beta, owners.get(owner, owner), seed, fresh)


# ------------------------------------------------------------------ dealing out
@settings(max_examples=examples(60))
@given(sizes=st.lists(mnk, max_size=6), parts=st.integers(1, 4))
def test_balance_keeps_grahams_bound(comm: Any, sizes: Sizes, parts: int) -> None:
    owner = balance(sizes, parts)
    assert np.array_equal(owner, balance(np.array(sizes).reshape(-1, 3), parts))  # type: ignore[arg-type]
    flops = np.array([2 * m * n * k for m, n, k in sizes], int)
    every = np.array(list(itertools.product(range(parts), repeat=len(sizes))), int)
    best = min(np.stack([flops @ (every == part).T for part in range(parts)]).max(axis=0))
    load = np.bincount(owner, flops, parts)
    assert len(load) == parts  # owners are 0 to parts - 1
    assert load.max() * 3 * parts <= (4 * parts - 1) * best


def test_balance_prefers_low_owners(comm: Any) -> None:
    assert balance([(2, 2, 2)] * 5, 3).tolist() == [0, 1, 2, 0, 1]
    assert balance([(1, 1, 1), (1, 1, 4), (1, 3, 1), (2, 1, 1)], 2).tolist() == [0, 0, 1, 1]
    assert balance([], 2).tolist() == []
    with pytest.raises(ArgumentError, match="got 0"):
        balance([], 0)


# ------------------------------------------------------------------ communication
def test_nothing_is_sent_but_the_check(comm: Any) -> None:
    called: list[str] = []

    class Counting(MPI.Intracomm):
        def __getattribute__(self, name: str) -> Any:
            if name not in ("rank", "size", "Get_rank", "Get_size", "handle"):
                called.append(name)
            return super().__getattribute__(name)

    for sizes in ([(3, 3, 3)] * 7, [(3, 3, 3), (2, 2, 2)] * 3):
        items = [np.ones((m, k)) for m, _, k in sizes]
        A, B = Batch.from_global(items, Counting(comm)), Batch.from_global(items, Counting(comm))
        called.clear()
        matmul_batched(A, B)
        assert called == ["Allreduce"] * (comm.size > 1)
        called.clear()
        if comm.rank == 0:  # without check=, the call is not collective
            C = matmul_batched(A, B, check=False, alpha=2)
            assert all((x == 2 * len(x)).all() for x in C.items)
        assert called == []


# ------------------------------------------------------------------ bad input
def test_bad_input_is_refused_on_all_ranks_alike(comm: Any) -> None:
    def batch(*shape: int, dtype: Any = float, owner: Any = None) -> Any:
        return Batch.from_global(np.zeros(shape, dtype), comm, owner)

    count = 2 * comm.size  # two items per rank
    A, B, C = batch(count, 6, 4), batch(count, 4, 5), batch(count, 6, 5)
    mixed = Batch.from_global([*np.zeros((count - 1, 4, 5)), np.zeros((3, 5))], comm)
    frozen, square = batch(count, 6, 5), batch(count, 4, 4)
    frozen.items.flags.writeable = False
    own = np.zeros((2, 4, 8))
    left, both = Batch.from_local(own[:, :, :4], comm), Batch.from_local(own[:, :, 3:7], comm)
    many = [np.zeros((4, 4)), np.zeros((3, 4))]
    lists, ragged, twice, fresh = (
        Batch.from_local(x, comm)
        for x in (many, [np.ones((4, 4)), many[0][:3]], [many[0], many[0][1:]], [x.copy() for x in many])
    )
    cases: list[tuple[type[PdgemmError], str, tuple[Any, ...], dict[str, Any]]] = [
        (LayoutError, r"item 0: inner dimensions.*op\(A\) is 6 x 4, op\(B\) is 6 x 4", (A, A), {}),
        (LayoutError, r"item 0: .*op\(A\) is 4 x 6, op\(B\) is 5 x 4", (A, B), {"transa": "T", "transb": "C"}),
        (LayoutError, rf"item {count - 1}: .*op\(A\) is 6 x 4, op\(B\) is 3 x 5", (A, mixed), {}),
        (LayoutError, r"item 0: shape mismatch.*op\(A\) is 6 x 4, op\(B\) is 4 x 5, C is 4 x 4", (A, B, square), {}),
        (LayoutError, f"A has {count} items, B has {count + 1}", (A, batch(count + 1, 4, 5)), {}),
        (LayoutError, f"A has {count} items, C has 0", (A, B, batch(0, 6, 5)), {}),
        (DTypeError, "B has dtype bool; supported: float8_e4m3fn", (A, batch(count, 4, 5, dtype=bool)), {}),
        (DTypeError, "C has dtype int8; supported: .*int32", (A, B, batch(count, 6, 5, dtype="i1")), {}),
        (DTypeError, "complex128 times B float64.*cannot be stored in C", (batch(count, 6, 4, dtype="D"), B, C), {}),
        (DTypeError, "accumulate_dtype float16", (A, B), {"accumulate_dtype": "f2"}),
        (DTypeError, "A must be a Batch", (np.zeros((2, 2, 2)), B), {}),
        (DTypeError, "B must be a Batch, got ndarray", (A, np.zeros((count, 4, 5))), {}),
        (DTypeError, "C must be a Batch, got float", (A, B, 0.0), {}),
        (DTypeError, "alpha must be a number, got str", (A, B), {"alpha": "1"}),
        (DTypeError, "beta = 1j is complex", (A, B, C), {"beta": 1j}),
        (ArgumentError, "transa is .*got 'X'", (A, B), {"transa": "X"}),
        (ArgumentError, "transb is .*got 1", (A, B), {"transb": 1}),
        (ArgumentError, "C is read-only", (A, B, frozen), {}),
        (ArgumentError, "C shares memory with A", (square, batch(count, 4, 4), square), {}),
        (ArgumentError, "C shares memory with B", (square, left, both), {}),
        (ArgumentError, "C shares memory with A", (lists, batch(count, 4, 4), ragged), {}),
        (ArgumentError, "C shares memory with itself", (fresh, batch(count, 4, 4), twice), {}),
    ]
    if comm.size > 1:
        alone = Batch.from_global(np.zeros((count, 4, 5)), MPI.COMM_SELF)
        cases += [
            (GridError, "A and B are batches over different ranks", (A, alone), {}),
            (LayoutError, "A is on rank 0, item 0 of B on rank 1", (A, batch(count, 4, 5, owner=[1] * count)), {}),
            (ArgumentError, "rank 0: .*alpha=0", (A, B), {"alpha": comm.rank}),
            (ArgumentError, "different arguments", (square, square), {"transa": "NT"[comm.rank % 2]}),
            (DTypeError, r"B must be a Batch.*\[rank 1 of", (A, None if comm.rank == 1 else B), {}),
        ]
    for kind, message, arguments, options in cases:
        refused(comm, kind, message, matmul_batched, *arguments, **options)


def test_batches_that_cannot_be_made(comm: Any) -> None:
    x = np.zeros((4, 3, 2))
    cases: list[tuple[type[PdgemmError], str, Any, tuple[Any, ...]]] = [
        (LayoutError, r"stack of matrices must be \(items, rows, columns\), got", Batch.from_local, (x[0], comm)),
        (LayoutError, r"item 1 is not a matrix, but has shape \(2,\)", Batch.from_global, ([x[0], x[0, 0]], comm)),
        (LayoutError, "pass numpy.ascontiguousarray", Batch.from_local, (np.zeros((3, 8, 8))[:, ::2, ::2], comm)),
        (LayoutError, "pass numpy.ascontiguousarray", Batch.from_local, ([np.zeros((8, 8))[::2, ::2]], comm)),
        (DTypeError, "one dtype.*got float32, float64", Batch.from_local, ([x[0], x[0].astype("f4")], comm)),
        (DTypeError, "native byte order, got >f8", Batch.from_global, (x.astype(">f8"), comm)),
        (LayoutError, r"for each of 4 items; got \[0, 0\]", Batch.from_global, (x, comm, [0, 0])),
        (LayoutError, r"owner must be a list of ranks below .*-1", Batch.from_global, (x, comm, [0, 0, 0, -1])),
        (LayoutError, r"owner must be a list of ranks below .*0.5", Batch.from_global, (x, comm, [0, 0, 0, 0.5])),
        (ArgumentError, "root 9 is not one of", Batch.from_global(x, comm).to_global, (9,)),
    ]
    if comm.size > 1:
        mixed, odd = x.astype("f8" if comm.rank else "f4"), [x[0, 0] if comm.rank == 1 else x[0]]
        cases += [
            (DTypeError, "one dtype.*got float32, float64", Batch.from_local, (mixed, comm)),
            (LayoutError, r"item 0 is not.* \[rank 1 of", Batch.from_local, (odd, comm)),
            (ArgumentError, "different arguments", Batch.from_global, (x[comm.rank :], comm)),
            (ArgumentError, "different arguments", Batch.from_global, (x, comm, [comm.rank] * 4)),
            (ArgumentError, "different arguments", Batch.from_global(x, comm).to_global, (min(comm.rank, 1),)),
        ]
    for kind, message, call, arguments in cases:
        refused(comm, kind, message, call, *arguments)


@pytest.mark.parametrize("where", ["host", "fake"])
def test_epilogues(comm: Any, where: str) -> None:
    """Stacks and lists, in place or with C narrower than its sums, compared with NumPy in double precision."""
    rng = np.random.default_rng(comm.rank)
    with fake_device() if where == "fake" else nullcontext() as device:

        def batch(items: list[np.ndarray]) -> Any:
            return Batch.from_local([device.to_device(x, "C") if device else x for x in items], comm)

        def values(batch: Any) -> list[np.ndarray]:
            return [(device.to_host(x) if device else x).astype(float) for x in batch.items]

        for alike, dtype, beta in itertools.product((True, False), ("float64", "float32", "float16"), (0, 0.5)):
            shapes = [(5, 6, 7)] * 3 if alike else [(4, 6, 1), (0, 6, 3), (9, 6, 2)]
            A, B, C0 = ([draw(rng, (x[i], x[j]), dtype) for x in shapes] for i, j in ((0, 2), (2, 1), (0, 1)))
            rows, residual = [draw(rng, (1, 6), "float32") for _ in shapes], [draw(rng, c.shape, dtype) for c in C0]
            C, aux = batch([c.copy() if beta else c * np.nan for c in C0]), batch([0 * c for c in C0])
            epilogue = Epilogue(scale=2.0, bias=batch(rows), activation="silu", residual=batch(residual), aux=aux)
            matmul_batched(batch(A), batch(B), C, beta=beta, epilogue=epilogue)
            results, kept = values(C), values(aux)
            slopes = values(matmul_batched(batch(A), batch(B), epilogue=epilogue.backward()))
            unit = float(np.finfo(dtype).eps)
            for operands, c, z, slope in zip(zip(A, B, C0, rows, residual), results, kept, slopes):
                a, b, c0, row, added = (x.astype(float) for x in operands)
                before, s = 2 * (a @ b + beta * c0) + row, 1 / (1 + np.exp(-z))
                for x, right in ((z, before), (c, before / (1 + np.exp(-before)) + added)):
                    assert np.allclose(x, right, rtol=2 * unit, atol=100 * min(unit, 1e-6))
                assert np.allclose(slope, (a @ b) * (s + z * s * (1 - s)), rtol=3 * unit, atol=1e-5 + 4 * unit)
        A, B, C = batch(A), batch(B), batch(C0)
        wrong: Any
        for error, message, wrong in (
            (LayoutError, "item 0 of residual is 1 x 6, but must be 4 x 6", Epilogue(residual=batch(rows))),
            (LayoutError, r"bias has the shape \(5,\)", Epilogue(bias=np.ones(5))),
            (DTypeError, "bias must be a number, array, .*; got list", Epilogue(bias=[1.0])),  # type: ignore[arg-type]
            (ArgumentError, "C shares memory with residual", Epilogue(residual=C)),
            (ArgumentError, "C shares memory with aux", Epilogue(aux=C)),
            (ArgumentError, "epilogue must be an Epilogue, got str", ""),
        ):
            refused(comm, error, message, matmul_batched, A, B, C, epilogue=wrong)
        if device:
            assert comm.allgather(device.races) == [[]] * comm.size
