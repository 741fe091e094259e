"""Errors before a step are the same on all ranks and name what is possible; an error in a step ends the job."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from plain_models import GPT, LENGTH, VOCABULARY, Perceptron, gpt_table, tokens  # noqa: E402

from pdgemm.errors import ArgumentError, DeviceError, MeshError  # noqa: E402
from pdgemm.training import Columns, Gathered, Mesh, Rows, Sequence, distribute  # noqa: E402
from pdgemm.training.layers.exchanges import flat_array  # noqa: E402
from pdgemm.training.layers.scores import Scores  # noqa: E402

pytestmark = pytest.mark.mpi


def refused(comm: Any, kind: type[Exception], match: str, model: Any, table: Any = None, **options: Any) -> None:
    """Check that `distribute` raises the same error on all ranks."""
    mesh = Mesh(comm, **options.pop("mesh", {"tp": comm.size}))
    with pytest.raises(kind, match=match) as error:
        distribute(model, mesh, table, **options)
    assert len({*comm.allgather(str(error.value))}) == 1
    mesh.free()


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
    refused(comm, ArgumentError, "different arguments.*checksum", model, mesh={"dp": -1})


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
