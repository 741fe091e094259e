"""docs/examples/gpt on meshes: losses, norms of gradients and parameters are those of one process, gradients those of
autograd, and what moves and what is kept is what formulas say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import gpt_reference
import h5py
import numpy as np
import pytest
from example_programs import example
from mpi4py import MPI
from tiers import in_turn, square_grid, third

from pdgemm import PdgemmError
from pdgemm.parallel import Sampler

pytestmark = pytest.mark.mpi
SIZES = "--vocabulary 101 --hidden 24 --heads 4 --layers 5 --sequence 17 --batch 12 --dtype float64 --no-report"
STEPS = 2


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
    return np.random.default_rng(8).integers(0, 101, 700)


def one_process(comm: Any, words: str, steps: int = STEPS) -> Any:
    """Return the numbers of one process, without options that change no number."""
    words = re.sub(r"--(schedule|recompute|zero) \w+ ?|--no-sequence-parallel ?", "", words)
    return comm.bcast(alone(words, steps) if comm.rank == 0 else None)


@cache
def alone(words: str, steps: int) -> np.ndarray:
    return run_of(MPI.COMM_SELF, "--dp", "1", *words.split(), steps=steps)[1]


def check_words(run: Any, steps: int, mesh: dict[str, int]) -> None:
    """Those of all kinds are as predicted; those of a router and of experts are of the layers that have experts."""
    report, kinds = run.times.report(), ("tensor", "context", "pipeline", "router", "experts")
    assert {kind: run.mesh.traffic[kind].words_received for kind in kinds} == report.expected, mesh
    expected = example("gpt/accounting").expected_words(run)
    assert report.expected == {"experts": report.expected["experts"]} | {k: steps * n for k, n in expected.items()}
    assert report.as_predicted and ", predicted " not in str(report), mesh
    moves = [mesh["dp"] * mesh["cp"] * mesh["tp"] > 1, mesh["ep"] > 1]
    for kind, axes in zip(("router", "experts"), moves):
        received = run.mesh.comm.allreduce(report.expected[kind])
        assert (received > 0) == bool(run.sizes.experts and axes), (kind, mesh)


OPTIONS = [
    "",
    "--schedule gpipe --recompute full",
    "--schedule zero_bubble --microbatches 3 --dropout 0.2",
    "--no-sequence-parallel --untied --microbatches 3",
    "--zero 1 --kv-heads 2 --microbatches 4",
    "--zero 3 --untied --microbatches 2",
    "--zero 1 --optimizer muon --microbatches 2",
]
MIXTURES = [
    "--experts 4 --capacity 1.0 --microbatches 2",
    "--zero 2 --dropout 0.1 --recompute full --experts 4",
    "--schedule zero_bubble --recompute selective --experts 4 --topk 1",
]


@square_grid
@pytest.mark.parametrize(("options", "experts"), [(OPTIONS, 0), (MIXTURES, 4)], ids=["dense", "experts"])
def test_meshes_have_the_losses_of_one_process(comm: Any, options: list[str], experts: int) -> None:
    """In float64 to 1e-12, and so the norms of the gradients; each rank receives the words of formulas."""
    for mesh, words in in_turn(meshes(comm.size, experts), options):
        if mesh["dp"] > 3 + experts or (mesh["tp"] > 2 and "kv" in words):
            continue
        run, numbers = run_of(comm, *words_of(mesh), *words.split())
        np.testing.assert_allclose(numbers, one_process(comm, words), rtol=1e-12, err_msg=f"{mesh} {words}")
        check_words(run, STEPS, mesh)


@pytest.mark.on_ranks(3)
def test_ranks_without_positions(comm: Any) -> None:
    """Of sequences of one token; and parts of microbatches of 3 or 4 samples, which ranks along dp do not divide."""
    words = "--sequence 1 --batch 10 --microbatches 3"
    for mesh in meshes(comm.size):
        if mesh["dp"] <= 3:
            _, numbers = run_of(comm, *words_of(mesh), *words.split())
            np.testing.assert_allclose(numbers, one_process(comm, words), rtol=1e-12, err_msg=str(mesh))


@square_grid
@pytest.mark.parametrize("words", ["--zero 3", "--zero 3 --untied --recompute full"])
def test_interleaved_stages(comm: Any, words: str) -> None:
    """Two stages, each with two blocks of layers, of which one has a layer less; a pass gathers those of its block."""
    words = f"--layers 7 --microbatches 4 {words}"
    sizes = ["--dp", str(comm.size // 2), "--pp", "2", "--schedule", "interleaved", "--chunks", "2"]
    run, numbers = run_of(comm, *sizes, *words.split())
    np.testing.assert_allclose(numbers, one_process(comm, words), rtol=1e-12)
    assert run.times.report().as_predicted


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("words", ["", "--untied --kv-heads 2", "--experts 4 --capacity 1.0 --recompute full"])
def test_gradients_are_those_of_autograd(comm: Any, words: str) -> None:
    """At step 1, in float64, to 1e-13 of the norm of all gradients, on some meshes."""
    autograd = pytest.importorskip("autograd")
    import autograd.numpy as xp

    possible = [*meshes(comm.size, 4 if "experts" in words else 0)]
    for mesh in third([x for x in possible if not (x["tp"] > 2 and "kv" in words)][::-1]):
        run, values, microbatches, computed = first_gradients(comm, *words_of(mesh), *words.split())
        expected = autograd.grad(gpt_reference.loss, 2)(xp, run.sizes, values, microbatches)
        norm = np.sqrt(sum(np.square(g).sum() for g in expected.values()))
        for name, gradient in computed.items():
            window = run.buckets.divisions[name].window(run.mesh.shape, run.mesh.rank)
            assert np.linalg.norm(gradient - expected[name][window]) <= 1e-13 * norm, (mesh, name)


def first_gradients(comm: Any, *words: str) -> tuple[Any, Any, list[np.ndarray], dict[str, np.ndarray]]:
    """Return a run, all parameters, the tokens of each microbatch, and the gradients of the first step on this rank."""
    train = example("gpt/train")
    options = train.parsed([*SIZES.split(), *words])
    run, whole = train.Run(options, comm), dict[str, np.ndarray]()
    rng = np.random.default_rng(9)
    for part in comm.allgather({name: x.shape for name, x in run.buckets.divisions.items()}):
        whole |= {name: np.zeros(shape) for name, shape in part.items()}
    whole = {name: 0.3 * rng.standard_normal(whole[name].shape) for name in sorted(whole)}
    for name, division in run.buckets.divisions.items():
        run.buckets.set_parameter(name, whole[name][division.window(run.mesh.shape, run.mesh.rank)])
    windows = np.lib.stride_tricks.sliding_window_view(text(), options.sequence + 1)

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
@pytest.mark.on_ranks(3)
@pytest.mark.parametrize(("recompute", "schedule"), in_turn(["none", "selective", "full"], ["1f1b", "gpipe"]))
def test_live_activations_are_those_in_flight(comm: Any, recompute: str, schedule: str) -> None:
    """On each stage at most: the bytes of a layer by formula, times its layers and the microbatches in flight."""
    accounting, train = example("gpt/accounting"), example("gpt/train")
    for mesh in meshes(comm.size):
        if mesh["dp"] > 1 or mesh["pp"] < min(3, comm.size):
            continue
        words = [*words_of(mesh), "--schedule", schedule, "--recompute", recompute, "--microbatches", "4"]
        run = train.Run(train.parsed([*SIZES.split(), "--steps", "1", *words]), comm)
        run.model = model = _Measured(run.model)
        list(run.steps(text()))
        each = accounting.activation_bytes(model, 3, len(run.order(0, run.mesh.rank)))
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


# ---------------------------------------------------------------- bits, and states
SAME = ["--same-bits", "--clip", "0.5", "--kv-heads", "2"]
LAYOUTS = [  # of 4 microbatches: dp times those of a rank
    "--dp 4 --microbatches 1 --zero 2",
    "--dp 2 --pp 2 --microbatches 2 --zero 1 --recompute selective --schedule zero_bubble",
    "--dp 2 --pp 2 --microbatches 2 --zero 3 --schedule interleaved --chunks 2",
]


@square_grid
def test_the_same_bits(comm: Any, shared_tmp_path: Path) -> None:
    """With `same_bits` and clipping: any dp, pp, schedule, stage and recomputation leave the same parameters."""
    paths, norms = [shared_tmp_path / f"{at}.h5" for at, _ in enumerate(LAYOUTS)], []
    for path, words in zip(paths, LAYOUTS):
        norms.append(run_of(comm, *SAME, "--state", str(path), *words.split())[1][:, 1])
    if comm.rank == 0:
        one = shared_tmp_path / "one.h5"
        norms.append(run_of(MPI.COMM_SELF, *SAME, "--state", str(one), "--microbatches", "4")[1][:, 1])
        assert norms[0].min() > 0.5 and all((norms[-1] == x).all() for x in norms)
        for path in paths:
            assert different(one, path) == []
    comm.Barrier()


@pytest.mark.on_ranks(2)
def test_a_run_goes_on_with_the_same_bits(comm: Any, shared_tmp_path: Path) -> None:
    """Two steps along dp, two in stages, and two in one process: the state of six steps in one process."""
    paths = [shared_tmp_path / f"{name}.h5" for name in ("parts", "one")]
    common = [[*SAME, "--every", "2", "--state", str(path)] for path in paths]
    for zero, (axis, microbatches) in enumerate((("dp", "2"), ("pp", "4")), 1):
        words = ["--microbatches", microbatches, "--zero", str(zero)]
        begun(comm, {axis: 2}, [*common[0], *words], 2 * zero)
        comm.Barrier()
    if comm.rank == 0:
        for words in common:
            begun(MPI.COMM_SELF, {"dp": 1}, [*words, "--microbatches", "4"], 6)
        assert different(*paths) == []
    comm.Barrier()


def different(one: Path, other: Path) -> list[str]:
    """Return the names of the arrays of two HDF5 files that are not equal to the bit."""
    a, b = arrays_of(one), arrays_of(other)
    return [name for name in {**a, **b} if name not in a or name not in b or a[name].tobytes() != b[name].tobytes()]


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an HDF5 file by name."""
    arrays: dict[str, np.ndarray] = {}

    def look(name: str, x: Any) -> None:
        if isinstance(x, h5py.Dataset):
            arrays[name] = x[()]

    with h5py.File(path) as file:
        file.visititems(look)
    return arrays


@square_grid
@pytest.mark.parametrize(
    ("words", "mesh", "other"),
    [("", {"dp": 2, "tp": 2}, {"pp": 2, "cp": 2}), ("--experts 4", {"dp": 4, "ep": 4}, {"dp": 2, "tp": 2, "ep": 2})],
)
def test_a_run_goes_on_in_another_layout(
    comm: Any, shared_tmp_path: Path, words: str, mesh: dict[str, int], other: dict[str, int]
) -> None:
    """Two steps on one mesh, two more on another, and two in one process: the losses of one process."""
    common = [*words.split(), "--microbatches", "2", "--every", "2", "--state", str(shared_tmp_path / "run.h5")]
    one = one_process(comm, f"{words} --microbatches 2", 6)
    losses = [*begun(comm, mesh, common, 2), *begun(comm, other, [*common, "--zero", "1"], 4)]
    comm.Barrier()
    if comm.rank == 0:
        losses += begun(MPI.COMM_SELF, {"dp": 1}, common, 6)
        np.testing.assert_allclose(losses, one[:, 0], rtol=1e-12)
    comm.Barrier()


def begun(comm: Any, mesh: dict[str, int], words: list[str], last: int) -> list[float]:
    """Return the losses of the steps of a run of 6 that are left, up to a step; it is broken off in the next one."""
    train = example("gpt/train")
    run, losses = train.Run(train.parsed([*SIZES.split(), "--steps", "6", *words_of(mesh), *words]), comm), []
    for step, loss, _ in run.steps(text()):
        if step > last:  # after the state of the step before was saved
            break
        losses.append(loss)
    return losses


# ---------------------------------------------------------------- the command
ERRORS = {
    "--tp {n} --heads 1": "tp divides the heads, and may be 1",
    "--pp {n} --layers 0": "0 layers on",
    "--dp {n} --batch 0": "batch must be >= 1, got 0",
    "--schedule zigzag": "zigzag",
    "--schedule interleaved --chunks 2 --pp {n} --microbatches {n} --layers 1": "1 layer on",
    "--experts 4 --topk 5": "a token chooses 1 to 4 different experts",
    "--experts 3 --ep {n} --dp {n}": "3 experts are not divided over ep",
    "--sequence 500000": "a text of 46.... tokens has no window of 500001",
    "--vocabulary 0": "vocabulary must be >= 1, got 0",
    "--vocabulary 100 --pp {n}": "the text has the token 2..: --vocabulary is at least 2.., got 100",
    "--dropout 1": "rate is from 0 to less than 1",
    "--heads 0": "heads is 1 or more, got 0",
    "--hidden 2": "hidden is 4 or more, got 2",
    "--experts -1": "experts is 0 or more, got -1",
    "--show 0": "show is 1 or more, got 0",
    "--steps -1": "steps is 0 or more, got -1",
    "--experts 2 --tp {n} --no-sequence-parallel": "experts take sequence=True on",
}


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("words", ERRORS)
def test_errors(comm: Any, words: str) -> None:
    """Each is one exception of the package on all ranks."""
    small = ["--hidden", "8", "--heads", "4", "--layers", "4", "--sequence", "16", "--batch", "8", "--steps", "1"]
    with pytest.raises(PdgemmError, match=ERRORS[words]):
        example("gpt/train").main(*small, *words.format(n=comm.size).split())


@pytest.mark.on_ranks(2)
def test_the_command(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It draws, trains, and prints the report, once."""
    losses = shared_tmp_path / "losses.json"
    words = "--hidden 16 --heads 4 --layers 4 --sequence 16 --batch 8 --steps 20 --microbatches 2 --rate 0.02"
    how = ["--experts", "2", "--pp", str(comm.size), "--draw", "--losses", str(losses), "--schedule", "zero_bubble"]
    example("gpt/train").main(*words.split(), *how)
    printed = capsys.readouterr().out
    if comm.rank:
        assert printed == ""
        return
    assert "zero_bubble: " in printed and "W0" in printed
    assert "20 steps in" in printed and "tokens/s" in printed and "MFU" in printed and "predicted 0" not in printed
    assert "of choices dropped; the most loaded one" in printed
    numbers = json.loads(losses.read_text())
    assert len(numbers) == 20 and numbers["20"][0] < numbers["1"][0] - 0.5
