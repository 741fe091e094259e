"""Mixtures of experts that are divided along ep: losses, norms, parameters and words, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from plain_models import GPT, HIDDEN, gpt_table, own_samples  # noqa: E402
from trained_models import check, float64, refused, trained  # noqa: E402

from pdgemm.errors import ArgumentError, MeshError  # noqa: E402
from pdgemm.training import Experts, LossScale, Mesh, MixtureOfExperts, Replicated, distribute  # noqa: E402

pytestmark = pytest.mark.mpi
EXPERTS = 12  # 2, 3 and 4 divide them


@pytest.fixture(autouse=True)
def _types() -> Iterator[None]:
    torch.manual_seed(7)
    with float64():
        yield


def balanced() -> Any:
    """Return a GPT whose second layer of a block is a mixture of experts, of which a loss balances the loads."""
    model = GPT()
    for block in model.blocks:
        block.up = MixtureOfExperts(HIDDEN, 10, EXPERTS, gated=True, activation=torch.nn.functional.silu, balance=0.5)
        block.down = torch.nn.Identity()
    return model


def dropless() -> Any:
    """Return a GPT with experts whose loads nothing balances."""
    model = GPT()
    for number, block in enumerate(model.blocks):
        block.up, block.down = MixtureOfExperts(HIDDEN, 10, EXPERTS, 1 + number % 3), torch.nn.Identity()
    return model


def unbalanced() -> Any:
    """Return a GPT whose tokens all choose experts 7 and 8: on 2 ranks along ep, the first one has nothing to do."""
    model = balanced()
    with torch.no_grad():
        for block in model.blocks:
            block.norm2.weight[0], block.norm2.bias[0] = 0.0, 5.0
            block.up.router[:, 0] = -10.0
            block.up.router[7:9, 0] = 10.0
    return model


def table(sequence: bool) -> dict[str, Any]:
    return {**gpt_table(sequence), "*.up": Experts(), "*.down": Replicated()}


MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"dp": 2, "ep": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}],
    3: [{"dp": 3, "ep": 3}],
    4: [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2}, *({"dp": 2, "ep": 2, axis: 2} for axis in ("tp", "pp", "cp"))],
}


@pytest.mark.on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("make", [balanced, dropless, unbalanced])
def test_experts_on_every_mesh(comm: Any, make: Any) -> None:
    """With each ZeRO stage, recomputation, a pipeline and microbatches."""
    for number, axes in enumerate(MESHES[comm.size]):
        for k in range(2):
            how = {
                "zero": (number + 2 * k + (make is dropless)) % 4,
                "recompute": ("none", "blocks")[k],
                "microbatches": 2 if make is dropless else 1,
                "schedule": ("zero_bubble", "1f1b")[k],
            }
            run, results = trained(comm, make, table(sequence=bool((number + k) % 2)), axes, blocks="blocks", **how)
            check(run, results, make, (axes, how))
            run.mesh.free()


@pytest.mark.parametrize(("topk", "gated"), [(1, False), (2, True), (3, False)])
def test_a_mixture_is_its_formula(comm: Any, topk: int, gated: bool) -> None:
    """Results and gradients are those of all experts for all tokens, with the balance loss added to the loss."""
    torch.manual_seed(4)
    module, x = MixtureOfExperts(5, 7, 6, topk, gated=gated, balance=0.3), torch.randn(3, 4, 5, requires_grad=True)
    (module(x) ** 2).sum().backward()
    ours = [y.grad for y in (x, *module.parameters())]
    x.grad = None
    module.zero_grad()
    p = (x @ module.router.T).softmax(-1)
    used = torch.zeros_like(p).scatter(-1, p.argsort(-1, descending=True)[..., :topk], 1.0)
    gates = p * used / ((p * used).sum(-1, keepdim=True) if topk > 1 else 1)
    hidden = torch.einsum("bsi,eij->bsej", x, module.w_in)
    f = torch.nn.functional.gelu
    hidden = f(hidden[..., :7]) * hidden[..., 7:] if gated else f(hidden)
    y = torch.einsum("bsej,eji,bse->bsi", hidden, module.w_out, gates)
    balance_loss = 0.3 * 6 * (used.mean((0, 1)) / topk * p.mean((0, 1))).sum()
    ((y**2).sum() + balance_loss).backward()
    assert torch.equal(module.loads, used.sum((0, 1)))
    assert abs(module.balance_loss - balance_loss.item()) <= 1e-14
    for gradient, z in zip(ours, (x, *module.parameters())):
        assert torch.allclose(gradient, z.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.on_ranks(1, 2, 3)
def test_each_microbatch_is_balanced(comm: Any) -> None:
    """A microbatch of all replicas has a balance loss with its share of the step, and with the scale of the loss."""
    torch.manual_seed(6)
    mesh, mse = Mesh(comm, dp=comm.size, ep=comm.size), torch.nn.functional.mse_loss
    plain, x = MixtureOfExperts(4, 8, 6, balance=2.0), torch.randn(12, 3, 4)

    def weight(x: Any, *_: Any) -> Any:
        return x[0, 0, 0].exp()

    options = {"loss": mse, "microbatches": 2, "weight": weight, "loss_scale": LossScale(2.0**9)}
    run = distribute(deepcopy(plain), mesh, {"": Experts()}, **options)
    run.step(*own_samples(mesh, (x, x)))
    parts = [part.tensor_split(2) for part in x.tensor_split(comm.size)]
    weights = [[weight(y) for y in part] for part in parts]
    total = sum(map(sum, weights))
    for k in range(2):
        plain.balance = 2.0 * float(sum(w[k] for w in weights) / total)
        y = plain(torch.cat([part[k] for part in parts])).split([len(part[k]) for part in parts])
        sum(mse(z, part[k]) * w[k] / total for z, part, w in zip(y, parts, weights)).backward()
    norm = float(torch.nn.utils.get_total_norm(z.grad for z in plain.parameters()))
    assert abs(run.norm - norm) <= 1e-12 * norm
    mesh.free()


@pytest.mark.on_ranks(2, 3, 4)
def test_words_of_experts(comm: Any) -> None:
    """A choice of an expert of another rank sends a row there and a row back, and so do the gradients."""
    p, samples, own = comm.size, 12, EXPERTS // comm.size
    x = torch.randn(samples, 12, HIDDEN, generator=torch.Generator().manual_seed(5))

    def make() -> Any:
        torch.manual_seed(6)
        return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), MixtureOfExperts(HIDDEN, 8, EXPERTS))

    plain, mesh = make(), Mesh(comm, dp=p, ep=p)
    counts = []
    for part in x.tensor_split(p):
        plain(part)
        counts.append(plain[1].loads.view(p, own).sum(1))
    rows = torch.stack(counts).long()  # from, to
    run = distribute(make(), mesh, {"1": Experts()}, loss=torch.nn.functional.mse_loss, zero=1)
    expected = run.expected(*own_samples(mesh, (x, x)))
    run.step(*own_samples(mesh, (x, x)))
    arriving, leaving = (int(n.sum() - rows[comm.rank, comm.rank]) for n in (rows[:, comm.rank], rows[comm.rank]))
    traffic = run.report.traffic
    assert traffic["experts"].words_sent == traffic["experts"].words_received == 2 * HIDDEN * (arriving + leaving)
    assert traffic["router"].words_received == 2 * EXPERTS * (p - 1)
    assert traffic["router"] == expected["router"] and traffic["gradients"] == expected["gradients"]
    evenly = samples * 12 * 2 // p * (p - 1) // p  # rows of a rank for other ranks
    assert expected["experts"].words_sent == 4 * HIDDEN * evenly
    assert torch.equal(run.model[1].loads.long().view(p, own).sum(1), rows.sum(0))
    mesh.free()


def test_experts_of_bfloat16(comm: Any) -> None:
    """Losses follow those of one process within the noise of 16 bits."""
    mesh, x = Mesh(comm, dp=2, ep=2), torch.randn(8, 4, generator=torch.Generator().manual_seed(5)).bfloat16()
    torch.manual_seed(0)
    model = MixtureOfExperts(4, 8, 4).bfloat16()
    expected = torch.nn.functional.mse_loss(model(x), x).item()
    run = distribute(model, mesh, {"": Experts()}, loss=torch.nn.functional.mse_loss)
    assert abs(run.step(*own_samples(mesh, (x, x))) - expected) <= 0.01 * expected
    mesh.free()


def test_experts_that_do_not_fit(comm: Any) -> None:
    axes = {"mesh": {"dp": 2, "ep": 2}}
    possible, one = r"ep 2 does not divide 3 experts; possible are \[1, 3\]", torch.nn.Sequential
    refused(comm, MeshError, possible, one(MixtureOfExperts(4, 4, 3)), {"0": Experts()}, **axes)
    needs = "'0', a MixtureOfExperts, needs the placement Experts"
    refused(comm, ArgumentError, needs, one(MixtureOfExperts(4, 4, 3)), mesh={"dp": 2})
    refused(comm, ArgumentError, "ep 2 divides experts, and no MixtureOfExperts is placed", GPT(), **axes)
    refused(comm, ArgumentError, "Experts divides a MixtureOfExperts, and not a Linear",
            torch.nn.Sequential(torch.nn.Linear(4, 4)), {"0": Experts()}, **axes)  # fmt: skip
    with pytest.raises(ArgumentError, match="topk = 5 of 4 experts: possible are 1 to 4"):
        MixtureOfExperts(4, 4, 4, 5)


def test_experts_of_hugging_face(comm: Any) -> None:
    """Their balance loss is that of one rank's samples, and `Experts` does not divide them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=9, num_key_value_heads=2, num_local_experts=2, **sizes)
    model = transformers.MixtralForCausalLM(config)
    table = {"model.layers.*.mlp": Experts()}
    refused(comm, ArgumentError, "and not a MixtralSparseMoeBlock", model, table, mesh={"dp": 2, "ep": 2})
    config.output_router_logits = True
    model = transformers.MixtralForCausalLM(config)
    refused(comm, ArgumentError, "for the samples of one rank: set output_router_logits to False", model,
            mesh={"dp": 2})  # fmt: skip
