"""Errors before a step are the same on all ranks and name what is possible; an error in a step ends the job."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from plain_models import GPT, LENGTH, VOCABULARY, Perceptron, gpt_table, tokens  # noqa: E402
from trained_models import check, float64, refused, trained  # noqa: E402

from pdgemm.errors import ArgumentError, DeviceError, MeshError  # noqa: E402
from pdgemm.support import watchdog  # noqa: E402
from pdgemm.training import Columns, Gathered, Mesh, Rows, Sequence, Vocabulary, distribute  # noqa: E402
from pdgemm.training.layers.context import flat_array  # noqa: E402
from pdgemm.training.layers.scores import Scores  # noqa: E402
from pdgemm.training.states.whole_states import WholeTensors  # noqa: E402
from pdgemm.training.storage import Storage  # noqa: E402

pytestmark = pytest.mark.mpi


def test_tables_that_do_not_fit(comm: Any) -> None:
    table = gpt_table()
    refused(comm, ArgumentError, "no module matches 'layers.*'", GPT(), {"layers.*": Rows()})
    refused(comm, ArgumentError, "two patterns .* match 'blocks.0.up'", GPT(), {**table, "blocks.0.up": Columns()})
    refused(comm, ArgumentError, "'head' to 'rows', which is not a placement", GPT(), {**table, "head": "rows"})
    missing = {name: x for name, x in table.items() if name != "head"}
    refused(
        comm, ArgumentError, "'head', a Linear, has parameters and no placement, which the mesh tp 2", GPT(), missing
    )
    different = {**table, "head": Rows()}
    refused(comm, ArgumentError, "'embedding.weight' is divided differently by its modules", GPT(), different)
    odd = {**table, "*.qkv": Columns(parts=3, heads=3)}
    refused(comm, MeshError, r"tp 2 does not divide 3 heads; possible are \[1, 3\]", GPT(), odd)
    model = Perceptron()
    model.count = 3
    divided = {"": Gathered("count"), "up": Columns(), "down": Rows()}
    refused(comm, MeshError, "tp 2 does not divide count = 3 of Perceptron", model, divided)


@pytest.mark.on_ranks(2, 4)
def test_a_refused_module_is_unchanged_and_can_be_distributed(comm: Any) -> None:
    """Also where the last module is refused, or a stage has too few blocks; then it has the numbers of one process."""
    mesh, table = {"tp": 2, "pp": comm.size // 2}, gpt_table()
    with float64():
        for kind, match, wrong, options in (
            (ArgumentError, "'embedding.weight' is divided differently by its modules", {"head": Rows()}, {}),
            (RuntimeError, "invalid for input of size", {"*.up": Columns(parts=5)}, {}),
            (MeshError, "tp 2 does not divide training = True of Block", {"blocks.?": Gathered("training")}, {}),
            (ArgumentError, "has 4 blocks, and the pipeline has", {}, {"chunks": 8, "schedule": "interleaved"}),
        ):
            model, refusals = GPT(), {"mesh": dict(mesh), "blocks": "blocks", "microbatches": 2, **options}
            refused(comm, kind, match, model, {**table, **wrong}, **refusals)
            run, results = trained(comm, lambda: model, table, mesh, blocks="blocks", microbatches=2)  # noqa: B023
            check(run, results, GPT, match)
            run.mesh.free()


def test_options_that_do_not_fit(comm: Any) -> None:
    refused(comm, ArgumentError, "zero is 0, 1, 2 or 3, got 4", GPT(), mesh={"dp": -1}, zero=4)
    unknown = "recompute 'all' is not one of none, attention, blocks"
    refused(comm, ArgumentError, unknown, GPT(), mesh={"dp": -1}, recompute="all")
    refused(comm, ArgumentError, "need blocks, the name of a list", GPT(), mesh={"pp": comm.size})
    parts = {"blocks": "blocks", "schedule": "interleaved", "chunks": 3, "microbatches": 2, "mesh": {"pp": comm.size}}
    refused(comm, ArgumentError, "has 4 blocks, and the pipeline has 6 parts", GPT(), **parts)
    refused(comm, ArgumentError, "microbatches", GPT(), mesh={"dp": -1}, microbatches=0)


def test_models_that_differ_between_ranks(comm: Any) -> None:
    model = GPT()
    with torch.no_grad():
        model.norm.bias[3] += comm.rank
    refused(comm, ArgumentError, "different arguments.*checksum .*torch.manual_seed makes", model, mesh={"dp": -1})


def test_tables_that_differ_between_ranks(comm: Any) -> None:
    table = {**gpt_table(), "*.up": Columns(parts=1 + comm.rank)}
    refused(comm, ArgumentError, "different arguments.*parts=2", GPT(), table)


def test_a_tensor_that_is_not_on_the_host() -> None:
    with pytest.raises(DeviceError, match="a tensor is on meta"):
        flat_array(torch.zeros(3, device="meta"))


def test_options_of_an_optimizer(comm: Any) -> None:
    mesh = Mesh(comm, dp=-1)
    with pytest.raises(ArgumentError, match=r"no parameter matches 'gain\*'"):
        distribute(GPT(), mesh).optimizer(torch.optim.SGD, {"gain*": {"lr": 0}}, lr=1)
    mesh.free()


def test_scores_are_the_whole_tensor_in_every_other_use(comm: Any) -> None:
    """Scores of a head that is divided: shapes, indices and functions are those of the whole tensor."""
    torch.manual_seed(0)
    mesh, table = Mesh(comm, tp=comm.size), {"0": Sequence(), "1": Columns(), "2": Rows(), "3": gpt_table()["head"]}
    x, model = torch.randn(2, LENGTH, 8), torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 10), torch.nn.Linear(10, 8), torch.nn.Linear(8, VOCABULARY)
    )  # fmt: skip
    expected = model(x).detach()
    run = distribute(model, mesh, table, loss=lambda scores, y: check_uses(scores, y, expected, mesh))
    run.step(x[:, :LENGTH], tokens(0)[1][:2].abs() % VOCABULARY)
    mesh.free()


def check_uses(scores: Any, labels: Any, expected: Any, mesh: Mesh) -> Any:
    """Check uses of scores; every rank has the rows of all positions behind a gathered layer."""
    if mesh.comm.size == 1:
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.reshape(-1))
    assert isinstance(scores, Scores)
    assert scores.shape == expected.shape == scores.size() and scores.size(-1) == VOCABULARY
    close = {"rtol": 0, "atol": 1e-5}
    assert torch.allclose(scores.whole(), expected, **close)
    assert torch.allclose(scores[:, 1:].softmax(-1), expected[:, 1:].softmax(-1), **close)
    assert torch.allclose(torch.log_softmax(scores, -1), expected.log_softmax(-1), **close)
    assert torch.equal(scores.argmax(-1), expected.argmax(-1))
    function, flat = torch.nn.functional.cross_entropy, labels.reshape(-1)
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3}):
        ours = function(scores.view(-1, VOCABULARY), flat, **options)
        assert torch.allclose(ours, function(expected.view(-1, VOCABULARY), flat, **options), **close), options
    with pytest.raises(ArgumentError, match=f"a target is outside of the {VOCABULARY} tokens"):
        function(scores.view(-1, VOCABULARY), flat + VOCABULARY)
    return function(scores.view(-1, scores.size(-1)), flat)


def test_modules_whose_results_depend_on_the_mesh(comm: Any) -> None:
    model = GPT()
    model.blocks[0].add_module("dropout", torch.nn.Dropout(0.1))
    refused(
        comm,
        ArgumentError,
        "'blocks.0.dropout', a Dropout, drops other features on each rank of tp 2",
        model,
        gpt_table(),
    )
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    refused(comm, ArgumentError, "'0', a BatchNorm1d, has statistics of one microbatch", model, mesh={"dp": -1})

    class Scaled(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    refused(comm, ArgumentError, "is not a plain nn.Linear", torch.nn.Sequential(Scaled(4, 4)), {"0": Columns()})
    other = torch.nn.Sequential(type("Conv1D", (Scaled,), {})(4, 4))  # a row for each input, as in GPT-2
    refused(comm, ArgumentError, "is not a plain nn.Linear", other, {"0": Vocabulary()})
    bounded = torch.nn.Sequential(torch.nn.Embedding(5, 4, max_norm=1.0))
    refused(comm, ArgumentError, "is not a plain nn.Embedding", bounded, {"0": gpt_table()["embedding"]})


def test_rules_of_whole_matrices(comm: Any) -> None:
    """Muon on a rank that has whole matrices is torch's; parts of matrices are refused on all ranks."""
    for zero, refuses in ((0, False), (1, True)):
        mesh, model = (
            Mesh(comm, dp=-1),
            torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 4, bias=False)),
        )
        run = distribute(model, mesh, zero=zero, loss=torch.nn.functional.mse_loss)
        if refuses:
            with pytest.raises(ArgumentError, match="Muon updates whole matrices, and this rank has a part of"):
                run.optimizer(torch.optim.Muon, lr=0.1)
        else:
            assert len(run.optimizer(torch.optim.Muon, lr=0.1).param_groups[0]["params"]) == 2
            run.step(torch.ones(3, 6), torch.zeros(3, 4))
        mesh.free()


def test_a_token_without_gradient(comm: Any) -> None:
    """The row of `padding_idx` is not updated on the rank that has it."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4, padding_idx=5), torch.nn.Linear(4, 7))
    before = model[0].weight.detach().clone()
    mesh, vocabulary = Mesh(comm, tp=comm.size), gpt_table()["embedding"]
    run = distribute(
        model,
        mesh,
        {"0": vocabulary, "1": vocabulary},
        loss=lambda x, y: torch.nn.functional.cross_entropy(x.view(-1, 7), y.view(-1)),
    )
    run.optimizer(torch.optim.SGD, lr=1.0)
    run.step(torch.tensor([[5, 1, 2]]), torch.tensor([[1, 2, 3]]))
    after = run.whole("0.weight")
    assert torch.equal(after[5], before[5]) and not torch.equal(after[1], before[1])
    mesh.free()


class Skipped(torch.nn.Module):
    """Blocks in another order, used twice, or with a second tensor, or whose input is used again behind them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.embedding = way, torch.nn.Embedding(9, 4)
        self.blocks, self.head = torch.nn.ModuleList(Second() for _ in range(2)), torch.nn.Linear(4, 9)
        if way == "scalar":
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: Any, labels: Any) -> Any:
        first = x = self.embedding(ids)
        for block in [*self.blocks][:: -1 if self.way == "reversed" else 1] * (2 if self.way == "twice" else 1):
            x = block(x, first if self.way == "second" else None)
        x = self.head(x + first if self.way == "skip" else x)
        return torch.nn.functional.cross_entropy(x.view(-1, 9), labels.view(-1))


class Second(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Any, second: Any = None) -> Any:
        return super().forward(x) if second is None else super().forward(x + second)


def test_models_that_stages_cannot_divide(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage does not have is refused, or the loss is NaN."""
    ids = torch.tensor([[1, 2, 3]])
    pipeline = {"mesh": {"pp": 2}, "blocks": "blocks"}
    refused(comm, ArgumentError, "'scale' belongs to a module that contains the blocks", Skipped("scalar"), **pipeline)
    with Mesh(comm, pp=2) as mesh:
        run = distribute(Skipped("skip"), mesh, blocks="blocks")
        assert run.step(ids, ids) != run.step(ids, ids)  # NaN
        monkeypatch.setattr(watchdog, "end_job", raise_)
        for way in ("twice", "reversed"):
            run = distribute(Skipped(way), mesh, blocks="blocks")
            if comm.rank == 0:
                run.expected(ids, ids)
            else:
                with pytest.raises(ArgumentError, match="uses block 0 twice in a pass, or after later blocks"):
                    run.expected(ids, ids)


class Outside(torch.nn.Module):
    """A model that uses a parameter outside of a module that has it."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.embedding = use, torch.nn.Embedding(9, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Any) -> Any:
        weight = self.blocks[1].weight
        assert weight.shape == (4, 4) and weight.size(0) == weight.numel() // 4 and not weight.new_zeros(1)
        used = self.use(weight)
        x = self.embedding(ids).to(weight.dtype)
        for block in self.blocks:
            x = block(x)
        return x + used


def test_parameters_that_are_not_whole(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of them fail in torch, other functions read freed memory, or with `lazy` elements of the last step."""
    monkeypatch.setattr(watchdog, "end_job", raise_)
    uses = (
        lambda w: torch.nn.functional.linear(torch.ones(4), w), lambda w: torch.mm(w, w), lambda w: w.T.sum(),
        lambda w: w + 1, lambda w: torch.cat([w, w]).sum(), lambda w: 0,
    )  # fmt: skip
    for (number, use), options in product(enumerate(uses), ({"zero": 3}, {"zero": 1, "lazy": True}, {"zero": 2})):
        mesh = Mesh(comm, dp=-1)
        run = distribute(Outside(use), mesh, loss=lambda y: y.mean(), **options)
        run.optimizer(torch.optim.SGD, lr=0.1)
        ids, step = torch.tensor([[1, 2, 3, 4]] * comm.size), run.step
        if options["zero"] < 3:
            step(ids)
        if options["zero"] == 2 or number == len(uses) - 1:
            step(ids)
        else:
            with pytest.raises(ArgumentError, match=r"^'blocks.1.weight' is used outside of its modules, and with"):
                step(ids)
        mesh.free()


def test_rows_that_a_divided_layer_does_not_have(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks along tp have some of the positions in front of a divided layer, and no other number of rows."""
    monkeypatch.setattr(watchdog, "end_job", raise_)

    class Last(Perceptron):
        def forward(self, x: Any) -> Any:
            return super().forward(self.norm(x[:, : self.positions]))

    for positions in (1, 5):
        model = Last()
        model.positions, model.norm = positions, torch.nn.LayerNorm(LENGTH)
        with Mesh(comm, tp=2) as mesh:
            table = {"norm": Sequence(), "up": Columns(), "down": Rows()}
            run = distribute(model, mesh, table, loss=lambda z: z.mean())
            with pytest.raises(ArgumentError, match=r"an activation of shape .* has .* rows on rank . of 2, where"):
                run.step(torch.ones(2, 12, LENGTH))


def raise_(_: int) -> None:
    """Raise the exception that would end the job."""
    raise


def test_a_module_is_distributed_once(comm: Any) -> None:
    model = Perceptron()
    with Mesh(comm, dp=-1) as mesh:
        distribute(model, mesh)
        with pytest.raises(ArgumentError, match="was distributed before"):
            distribute(model, mesh)


def test_positions_that_a_rank_does_not_have(comm: Any) -> None:
    """Modules and models that mix or count positions by themselves are refused under cp."""
    axes = {"mesh": {"cp": comm.size}}
    plain = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 1))
    refused(
        comm,
        ArgumentError,
        "cp 2 divides positions, and no embedding is placed by Vocabulary",
        plain,
        {"*": Rows()},
        **axes,
    )
    model = GPT()
    model.blocks[0].add_module("mix", torch.nn.GRU(4, 4))
    table = {**gpt_table(), "*.mix": Sequence()}
    refused(comm, ArgumentError, "'blocks.0.mix', a GRU, mixes positions", model, table, **axes)
    model = GPT()
    model.blocks[0].register_buffer("rows", torch.zeros(LENGTH))
    refused(comm, ArgumentError, "'blocks.0', a Block, has buffers and no placement", model, gpt_table(), **axes)


class EndedError(Exception):
    """The job would be ended."""


@pytest.mark.on_ranks(2, 4)
def test_an_exception_of_one_rank_outside_of_steps_ends_the_job(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where storages are allocated, the words of a step are counted, or a state is gathered or set."""

    def end(code: int) -> None:
        raise EndedError(code)

    def fails(*_: Any) -> None:
        raise MemoryError("planted")

    def is_last_set(tensors: Any, name: str, whole: Any) -> None:
        if name == "down.bias":  # other ranks wait for nothing behind it
            fails()

    monkeypatch.setattr(watchdog, "end_job", end)
    mesh, function = Mesh(comm, dp=-1), torch.nn.functional.mse_loss
    run = distribute(Perceptron(), mesh, loss=function)
    state = run.state_dict()
    for owner, name, failure, call in (
        (run.model, "forward", fails, lambda: run.expected(torch.ones(2, LENGTH), torch.ones(2, 3))),
        (Storage, "pieces", fails, lambda: distribute(Perceptron(), mesh, loss=function)),
        (WholeTensors, "set", is_last_set, lambda: run.load_state_dict(state)),
        (WholeTensors, "_parts", fails, lambda: WholeTensors(run, [], {}).gathered("down.bias", 0)),
    ):
        with monkeypatch.context() as planted:
            if comm.rank == comm.size - 1:
                planted.setattr(owner, name, failure)
                with pytest.raises(EndedError, match="1"):
                    call()
            else:
                call()
    mesh.free()
