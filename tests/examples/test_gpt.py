"""docs/examples/gpt on every mesh of these ranks: losses, norms of gradients and parameters are those of one process,
gradients those of autograd, and what moves and what is kept is what formulas say.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import gpt_reference
import numpy as np
import pytest
from example_programs import example
from tiers import thorough

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(1, 2, 3, 4, 6, 8)]
SIZES = "--vocabulary 1009 --hidden 48 --heads 4 --layers 5 --sequence 33 --batch 12 --dtype float64 --no-report"
MIXTURE = "--experts 4 --capacity 1.0"
STEPS = 3


def meshes(ranks: int, experts: int = 0) -> Iterator[dict[str, int]]:
    """Yield all meshes of the ranks that 4 heads, 5 layers and the experts can be divided on."""
    for dp, tp, pp, cp in product(range(1, ranks + 1), (1, 2, 4), range(1, 6), range(1, ranks + 1)):
        if dp * tp * pp * cp == ranks:
            for ep in range(1, dp + 1) if experts else (1,):
                if not dp % ep and not (experts and experts % ep):
                    yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


def words_of(mesh: dict[str, int]) -> list[str]:
    return [word for axis, n in mesh.items() for word in (f"--{axis}", str(n))]


def run_of(comm: Any, *words: str, steps: int = STEPS) -> tuple[Any, np.ndarray]:
    """Return a run of some steps, and the loss and the norm of the gradients of each step."""
    train = example("gpt/train")
    run = train.Run(train.parsed([*SIZES.split(), "--steps", str(steps), *words]), comm)
    return run, np.array([numbers for _, *numbers in run.steps(text())])


@cache
def text() -> np.ndarray:
    return np.random.default_rng(8).integers(0, 1009, 700)


@cache
def one_process(words: str, steps: int = STEPS) -> np.ndarray:
    from mpi4py import MPI

    return run_of(MPI.COMM_SELF, "--dp", "1", *words.split(), steps=steps)[1]


@pytest.mark.parametrize("steps", [STEPS, pytest.param(50, marks=thorough)])
@pytest.mark.parametrize("model", ["", MIXTURE])
def test_every_mesh_has_the_losses_of_one_process(comm: Any, model: str, steps: int) -> None:
    """In float64 to 1e-12, and so the norms of the gradients."""
    expected = one_process(model + " --microbatches 2", steps)
    for mesh in meshes(comm.size, 4 if model else 0):
        _, numbers = run_of(comm, *words_of(mesh), *model.split(), "--microbatches", "2", steps=steps)
        np.testing.assert_allclose(numbers, expected, rtol=1e-12, err_msg=str(mesh))


@pytest.mark.parametrize(
    "words",
    [
        "--schedule gpipe --recompute full",
        "--schedule zero_bubble --microbatches 3 --dropout 0.2",
        "--schedule zero_bubble --recompute selective --experts 4 --topk 1",
        "--no-sequence-parallel --untied",
        "--zero 1 --kv-heads 2 --microbatches 4",
        "--zero 2 --dropout 0.1 --recompute full",
        "--zero 3 --untied --microbatches 2",
    ],
)
def test_options_change_no_number(comm: Any, words: str) -> None:
    """Schedules, recomputation, dropout, stages of ZeRO, grouped heads: on some meshes, the losses of one process."""
    for mesh in [*meshes(comm.size, 4 if "experts" in words else 0)][::2]:
        if (mesh["dp"] * 4 > 12) or (mesh["tp"] > 2 and "kv" in words):
            continue
        _, numbers = run_of(comm, *words_of(mesh), *words.split())
        np.testing.assert_allclose(numbers, one_process(words), rtol=1e-12, err_msg=str(mesh))


def test_interleaved_stages(comm: Any) -> None:
    """Each with two blocks of layers, of which some have one layer and others none more than another."""
    words = f"--schedule interleaved --chunks 2 --layers 7 --microbatches {2 * comm.size}"
    if comm.size > 3:
        pytest.skip("7 layers are those of 3 stages with 2 blocks each")
    _, numbers = run_of(comm, "--pp", str(comm.size), *words.split())
    np.testing.assert_allclose(numbers, one_process(words.replace("interleaved --chunks 2", "1f1b")), rtol=1e-12)


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("words", ["", "--untied --kv-heads 2", "--experts 4 --capacity 1.0 --recompute full"])
def test_gradients_are_those_of_autograd(comm: Any, words: str) -> None:
    """At step 1, in float64, to 1e-13 of the norm of all gradients, on every mesh."""
    autograd = pytest.importorskip("autograd")
    import autograd.numpy as xp

    for mesh in meshes(comm.size, 4 if "experts" in words else 0):
        if "kv" in words and mesh["tp"] > 2:
            continue
        run, values, microbatches, computed = first_gradients(comm, *words_of(mesh), *words.split())
        expected = autograd.grad(gpt_reference.loss, 2)(xp, run.sizes, values, microbatches)
        norm = np.sqrt(sum(np.square(g).sum() for g in expected.values()))
        for name, gradient in computed.items():
            window = run.buckets.divisions[name].window(run.mesh.shape, run.mesh.rank)
            assert np.linalg.norm(gradient - expected[name][window]) <= 1e-13 * norm, (mesh, name)


def first_gradients(comm: Any, *words: str) -> tuple[Any, Any, list[np.ndarray], dict[str, np.ndarray]]:
    """Return a run, all parameters, the tokens of each microbatch, and the gradients of the first step on this rank."""
    train = example("gpt/train")
    options = train.parsed([*SIZES.split(), "--layers", "5", "--hidden", "24", "--vocabulary", "101", *words])
    run, whole = train.Run(options, comm), dict[str, np.ndarray]()
    rng = np.random.default_rng(9)
    for part in comm.allgather({name: x.shape for name, x in run.buckets.divisions.items()}):
        whole |= {name: np.zeros(shape) for name, shape in part.items()}
    whole = {name: 0.3 * rng.standard_normal(whole[name].shape) for name in sorted(whole)}
    for name, division in run.buckets.divisions.items():
        run.buckets.set_parameter(name, whole[name][division.window(run.mesh.shape, run.mesh.rank)])
    windows = np.lib.stride_tricks.sliding_window_view(text() % 101, options.sequence + 1)
    from pdgemm.parallel import Sampler

    rows = Sampler(len(windows), options.batch, seed=options.seed).rows(0)
    cuts = [options.batch * at // options.microbatches for at in range(options.microbatches + 1)]
    microbatches = [windows[rows[lo:hi]] for lo, hi in pairwise(cuts)]
    own = [windows[rows[lo:hi]] for lo, hi in run.samples()]
    samples = _Samples([(x,) for x in own], float(options.batch))
    run.model.begin([*run.batches(0, samples)])
    run.pipeline.run(run.model)
    run.buckets.finish()
    return run, whole, microbatches, {name: x.copy() for name, x in run.buckets.gradients.items()}


class _Samples(NamedTuple):
    arrays: list[tuple[np.ndarray]]
    divisor: float


# ---------------------------------------------------------------- what moves, and what is kept
@pytest.mark.parametrize("words", ["", "--no-sequence-parallel", "--recompute full --microbatches 3", "--experts 4"])
def test_words_are_those_of_formulas(comm: Any, words: str) -> None:
    """On every mesh, by kind, on each rank."""
    accounting = example("gpt/accounting")
    for mesh in meshes(comm.size, 4 if "experts" in words else 0):
        if "--no-sequence" in words and mesh["tp"] == 1:
            continue
        run, _ = run_of(comm, *words_of(mesh), *words.split(), steps=2)
        counted = {kind: run.mesh.traffic[kind].words_received for kind in ("tensor", "context", "pipeline")}
        expected = {kind: 2 * words for kind, words in accounting.expected_words(run).items()}
        assert counted == expected, mesh


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_live_activations_are_those_in_flight(comm: Any, recompute: str, schedule: str) -> None:
    """On each stage at most: the bytes of a layer by formula, times its layers and the microbatches in flight."""
    accounting, train = example("gpt/accounting"), example("gpt/train")
    for mesh in meshes(comm.size):
        if mesh["dp"] > 1:
            continue
        words = [*words_of(mesh), "--schedule", schedule, "--recompute", recompute, "--microbatches", "4"]
        run = train.Run(train.parsed([*SIZES.split(), "--steps", "1", *words]), comm)
        run.model = model = _Measured(run.model)
        list(run.steps(text()))
        tokens = 3 * len(model.context.positions)
        rows = run.rows(tokens)
        each = accounting.activation_bytes(model, 3, rows.stop - rows.start)
        number = sum(map(is_layer, model.pieces[0]))
        assert model.most == each * number * run.schedule.in_flight(run.mesh.index("pp")), mesh


class _Measured:
    """The model of a run, which measures the most bytes that its layers keep after a forward pass."""

    def __init__(self, model: Any) -> None:
        self._model, self.most = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
        y = self._model.forward(microbatch, chunk, x)
        live = [
            kept
            for (_, chunk), records in self._model.kept.items()
            for piece, kept in zip(self._model.pieces[chunk], records)
            if is_layer(piece)
        ]
        self.most = max(self.most, sum(map(bytes_of, live)))
        return y


def is_layer(piece: Any) -> bool:
    return type(piece).__name__ == "Layer"


def bytes_of(kept: Any) -> int:
    """Return the bytes of the memory that arrays in dictionaries and tuples lie in, each once."""
    memory: dict[int, int] = {}

    def look(x: Any) -> None:
        if isinstance(x, np.ndarray):
            while isinstance(x.base, np.ndarray):
                x = x.base
            memory[id(x)] = x.nbytes
        elif isinstance(x, dict):
            look(tuple(x.values()))
        elif isinstance(x, tuple | list):
            for each in x:
                look(each)

    look(kept)
    return sum(memory.values())
