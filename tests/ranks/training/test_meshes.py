"""Models of torch on every mesh: losses, norms, parameters and counted words, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from plain_models import (  # noqa: E402
    BLOCKS,
    GPT,
    HIDDEN,
    LENGTH,
    LLAMA_TABLE,
    SAMPLES,
    VOCABULARY,
    Llama,
    Perceptron,
    gpt_table,
    in_one_process,
    own_samples,
    tokens,
)  # fmt: skip
from tiers import every_grid, everything  # noqa: E402
from trained_models import STEPS, check, float64, trained  # noqa: E402

from pdgemm.instrument.recorder import Traffic  # noqa: E402
from pdgemm.parallel.mesh import Line  # noqa: E402
from pdgemm.schedules.training.row_collectives import rows_by_rank  # noqa: E402
from pdgemm.training import Columns, Mesh, Replicated, Rows, distribute  # noqa: E402
from pdgemm.training.training_run import Run  # noqa: E402
from pdgemm.transport.movers.arrivals import Transfers  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _types() -> Iterator[None]:
    with float64():
        yield


def meshes(size: int) -> list[dict[str, int]]:
    """Return all meshes of a number of ranks with at most 4 stages and 4 ranks along tp, which divide the heads."""
    return [
        {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
        for dp, tp, pp, cp in product(range(1, size + 1), repeat=4)
        if dp * tp * pp * cp == size and tp in (1, 2, 4) and pp <= BLOCKS and (tp < 4 or size == 4)
    ]


def ways(size: int) -> list[dict[str, Any]]:
    """Return meshes with everything else that may differ: each mesh at least once, each value many times."""
    listed = list[dict[str, Any]]()
    schedules = [("1f1b", 1, 2), ("gpipe", 1, 3), ("zero_bubble", 1, 3), ("interleaved", 2, 2), ("1f1b", 1, 1)]
    for number, mesh in enumerate(meshes(size)):
        for k in range(20 if everything() else 2):
            schedule, chunks, microbatches = schedules[(number + 2 * k) % 5]
            if schedule == "interleaved" and (mesh["pp"] != 2 or microbatches % mesh["pp"]):
                schedule, chunks = "zero_bubble", 1
            recompute = ("none", "attention", "blocks")[(number + k) % 3]
            listed.append(
                {**mesh, "zero": (number + k) % 4, "schedule": schedule, "chunks": chunks, "recompute": recompute,
                 "microbatches": microbatches, "sequence": (number + k) % 5 > 0, "tied": (number + k) % 3 > 0,
                 "lazy": (number + k) % 2 > 0}
            )  # fmt: skip
    return listed


def allocated(run: Run) -> dict[str, int]:
    """Return the bytes of the tensors that a run keeps between steps."""
    stored = [x for name, x in run.parameters.items() if x.parameter.requires_grad]
    storages = {x.parameter.untyped_storage().data_ptr(): x.parameter.untyped_storage() for x in stored}
    parts = [y for x in run.storages if x.layout.stage == 3 for y in x._own]
    kept = [x for optimizer in run.updates.optimizers for x in optimizer.state.values()]
    states = [y for x in kept for name, y in x.items() if name != "step"]
    tensors = {"gradients": [y for x in run.storages for y in x.gradients], "optimizer": states}
    sizes = {kind: sum(y.numel() * y.itemsize for y in values) for kind, values in tensors.items()}
    return {"parameters": sum(x.nbytes() for x in storages.values()) + sum(y.nbytes for y in parts), **sizes}


def plain_gpt() -> Any:
    return GPT()


def untied_gpt() -> Any:
    return GPT(tied=False)


@every_grid
@pytest.mark.parametrize("part", range(4))
def test_a_gpt_on_every_mesh(comm: Any, part: int) -> None:
    """With each schedule, ZeRO stage and recomputation, tied or untied, with and without sequence parallelism."""
    for how in ways(comm.size)[part::4]:
        options = dict(how)
        mesh = {axis: options.pop(axis) for axis in ("dp", "tp", "pp", "cp")}
        make = plain_gpt if options.pop("tied") else untied_gpt
        table = gpt_table(options.pop("sequence"))
        run, results = trained(comm, make, table, mesh, blocks="blocks", **options)
        expected = run.expected(*own_samples(run.mesh, tokens(0)))
        assert {*run.expected()} <= {*expected} and run.report.loss == results[-1][0]
        for kind in {*run.mesh.traffic, *expected}:
            assert run.report.traffic.get(kind, Traffic()) == expected.get(kind, Traffic()), (kind, how)
            assert run.mesh.traffic[kind] == sum([expected.get(kind, Traffic())] * STEPS, Traffic()), (kind, how)
        check(run, results, make, how)
        assert run.bytes() == allocated(run), how
        assert run.pipeline.peak <= run.schedule.in_flight(run.mesh.index("pp"))
        run.mesh.free()


@pytest.mark.parametrize("sequence", [False, True])
def test_weight_products_hide_sums_along_tp(comm: Any, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of each divided weight is multiplied between the start of a sum along tp and the wait for it."""
    run, _ = trained(comm, plain_gpt, gpt_table(sequence), {"tp": comm.size})
    events = list[str]()

    def noted(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (events.append(name), method(*a, **k))[1])

    noted(Line, "start")
    noted(Transfers, "wait")
    noted(torch, "mm")
    run.step(*own_samples(run.mesh, tokens(0)))
    products = [k for k, event in enumerate(events) if event == "mm" and events[k - 1] != "mm"]
    assert len(products) == 2 * BLOCKS + 1  # "qkv" and "up" of each block, and the scores of tokens
    for k in products:
        assert events[k - 1 : k + 5] == ["start", "mm", "mm", "mm", "mm", "wait"]
    run.mesh.free()


class Conv1D(torch.nn.Module):
    """A linear layer with a row for each input, as in Hugging Face's GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) / 5)
        self.bias = torch.nn.Parameter(torch.randn(outputs) / 5)

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Reshaped(torch.nn.Module):
    """A perceptron with a hidden feature for one rank only, of inputs that are reshaped."""

    def __init__(self, dims: int, linear: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dims, self.up, self.down = dims, linear(1, 6), linear(6, 1)

    def forward(self, x: Any) -> Any:
        x = {1: x.mean((0, 1)), 2: x.flatten(0, 1), 4: x[:, :, None].expand(-1, -1, 3, -1)}[self.dims]
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("dims", [1, 2, 4])
@pytest.mark.parametrize("frozen", ["", "up.weight", "up.bias"])
def test_divided_layers_of_any_inputs(comm: Any, dims: int, frozen: str) -> None:
    """Also where a rank has no column, and in a block of autocast, which leaves float64 as it is."""
    for linear, autocast in ((Conv1D, True), (lambda n, k: torch.nn.Linear(k, n), False)):
        with torch.autocast("cpu", enabled=autocast):
            models, mesh = [Reshaped(dims, linear) for _ in range(2)], Mesh(comm, tp=comm.size)
            for parameter in [x.get_parameter(frozen) for x in models if frozen]:
                parameter.requires_grad_(False)
            x, y = torch.linspace(-1, 1, 2 * 5 * 6).view(2, 5, 6), torch.tensor([1.0, 2.0])
            table = {"up": Columns(), "down": Rows()}
            run = distribute(models[0], mesh, table, loss=lambda z, y: (z - y.mean()).square().mean())
            theirs, _ = torch.optim.SGD(models[1].parameters(), 0.1), run.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(2):
                theirs.zero_grad()
                loss = (models[1](x) - y.mean()).square().mean()
                loss.backward()
                theirs.step()
                assert abs(run.step(x, y) - float(loss.detach())) <= 1e-14
            for name, parameter in models[1].named_parameters():
                assert torch.allclose(run.whole(name), parameter, rtol=0, atol=1e-14), (name, linear)
            mesh.free()


def test_frozen_weights_keep_no_inputs(comm: Any) -> None:
    """A divided layer saves its inputs for the gradient of its weight alone, and its weight for that of its inputs."""
    torch.manual_seed(0)
    saved = list[Any]()
    for frozen, first, expected in ((False, False, "xw"), (True, False, "w"), (False, True, "x")):
        mesh, linear = Mesh(comm, tp=comm.size), torch.nn.Linear(6, 4)
        before = torch.nn.Identity() if first else torch.nn.Linear(6, 6)
        linear.weight.requires_grad_(not frozen)
        run = distribute(
            torch.nn.Sequential(before, linear, torch.nn.Linear(4, 6)), mesh,
            {"0": Replicated(), "1": Columns(), "2": Rows()}, loss=torch.nn.functional.mse_loss,
        )  # fmt: skip
        run.model[1].register_forward_pre_hook(lambda *_: saved.clear())
        run.model[1].register_forward_hook(lambda *_: saved.append("end"))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.shape), x)[1], lambda x: x):
            run.step(torch.ones(2, 5, 6), torch.ones(2, 5, 6))
        own = {"x": (2, 5, 6), "w": run.model[1].weight.shape}
        assert saved[: saved.index("end")] == [own[key] for key in expected], (frozen, first)
        mesh.free()


def shared_gpt() -> Any:
    """Return a GPT whose first two blocks, and whose last two, have a matrix in common."""
    model = GPT()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[3].down.weight = model.blocks[2].down.weight
    return model


@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2}, {"dp": 2}])
def test_matrices_of_several_blocks(comm: Any, axes: dict[str, int]) -> None:
    """Blocks of one stage share a matrix; with several chunks its gradients are complete when the first one ends."""
    for zero, chunks in ((0, 1), (3, 1), (1, 2)):
        schedule = "interleaved" if chunks > 1 else "1f1b"
        if chunks > 1 and "pp" in axes:
            continue  # blocks 0 and 1 would be on two stages
        run, results = trained(
            comm,
            shared_gpt,
            gpt_table(),
            axes,
            blocks="blocks",
            zero=zero,
            schedule=schedule,
            chunks=chunks,
            microbatches=2,
        )
        check(run, results, shared_gpt, (axes, zero, chunks))
        run.mesh.free()


class Values(torch.nn.ModuleDict):
    """Blocks with names, in their order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def named_gpt() -> Any:
    """Return a GPT with its blocks in a dictionary."""
    model = GPT()
    model.blocks = Values({f"layer {name}": block for name, block in zip("bdca", model.blocks)})  # type: ignore[assignment]
    return model


@pytest.mark.on_ranks(2, 4)
def test_blocks_in_a_dictionary(comm: Any) -> None:
    for zero, how in ((1, {"schedule": "interleaved", "chunks": 2}), (3, {"recompute": "blocks"})):
        mesh, options = {"pp": 2, "dp": -1}, {"zero": zero, "microbatches": 2, **how}
        run, results = trained(comm, named_gpt, gpt_table(), mesh, blocks="blocks", **options)
        check(run, results, named_gpt, how)
        run.mesh.free()


@every_grid
def test_a_llama_on_every_mesh(comm: Any) -> None:
    """Its attention derives shapes from its inputs, which are gathered once for queries, keys and values."""
    for number, mesh in enumerate(meshes(comm.size)):
        if mesh["tp"] <= 2:  # of the 2 groups of keys
            schedule = ("1f1b", "zero_bubble")[number % 2]
            run, results = trained(
                comm, Llama, LLAMA_TABLE, mesh, blocks="blocks", zero=number % 4, schedule=schedule, microbatches=2
            )
            check(run, results, Llama, mesh)
            run.mesh.free()


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize("axes", [{"dp": 4, "ep": 2}, {"dp": 2, "ep": 1, "tp": 2}, {"dp": 2, "cp": 2, "ep": 1}])
def test_neighbours_divide_what_groups_copy(comm: Any, axes: dict[str, int]) -> None:
    """Hybrid sharding: parameters move inside of a group, and gradients are summed over the groups once in a step."""
    for zero in (1, 2, 3):
        run, results = trained(
            comm, plain_gpt, gpt_table(), axes, blocks="blocks", zero=zero, hybrid=True, microbatches=3
        )
        for kind, traffic in run.expected(*own_samples(run.mesh, tokens(0))).items():
            assert run.report.traffic[kind] == traffic, (kind, zero)
        (storage, *_) = run.storages
        assert storage.line.size * storage.layout.groups == comm.size // (axes.get("tp", 1))
        assert storage.layout.groups == axes["dp"] // axes["ep"]
        check(run, results, plain_gpt, (axes, zero))
        run.mesh.free()


@every_grid
def test_evaluation_by_stages(comm: Any) -> None:
    """The loss without gradients is that of the next step, and needs fewer words than its two passes."""
    for number, mesh in enumerate(meshes(comm.size)):
        mesh_of = Mesh(comm, **mesh)
        run = distribute(GPT(), mesh_of, gpt_table(), blocks="blocks", zero=number % 4, microbatches=2)
        run.optimizer(torch.optim.AdamW, lr=1e-2)
        batch = own_samples(mesh_of, tokens(0))
        loss, moved = run.evaluate(*batch), {kind: x.words_received for kind, x in mesh_of.traffic.items()}
        assert abs(loss - run.step(*batch)) <= 1e-13 * loss
        assert all(words <= run.report.traffic[kind].words_received for kind, words in moved.items() if words)
        assert run.evaluate(*batch) < loss
        mesh_of.free()


def test_words_of_tensor_parallel_layers(comm: Any) -> None:
    """Each block gathers and reduces its activations twice forward, and twice backward: Megatron's words exactly."""
    t, b = comm.size, SAMPLES
    mesh = Mesh(comm, tp=t)
    run = distribute(GPT(), mesh, gpt_table())
    run.step(*tokens(0))
    rows = rows_by_rank(LENGTH, t)
    gathered = b * HIDDEN * (LENGTH - rows[comm.rank])  # words received for the rows of other ranks
    reduced = b * HIDDEN * (t - 1) * rows[comm.rank]
    blocks = BLOCKS * 4 * (gathered + reduced)  # before qkv and up, behind out and down, and the adjoints
    ends = 2 * gathered + 2 * reduced  # behind the embedding, before the scores, and the adjoints
    part = sum(b * LENGTH * n // t + (comm.rank < b * LENGTH * n % t) for n in (1, 2))  # of the sums of cross-entropy
    losses = (t - 2) * part + 3 * b * LENGTH  # an all-reduce of n words: (t - 1) w of the rank's part, and n - w
    assert mesh.traffic["tensor"].words_received == blocks + ends + losses
    mesh.free()


def test_a_perceptron_in_few_lines(comm: Any) -> None:
    """A model that returns predictions, data parallel, with a loss function and weights by number of samples."""
    mesh, generator = Mesh(comm, dp=-1), torch.Generator().manual_seed(0)
    x, y = torch.randn(9, LENGTH, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = distribute(Perceptron(), mesh, loss=torch.nn.functional.cross_entropy, microbatches=2)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), 2, 0.5)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        theirs.step()
        assert abs(run.step(*own_samples(mesh, (x, y))) - float(loss.detach())) <= 1e-14
        scheduler.step()
    assert all(torch.allclose(run.whole(name), p, rtol=0, atol=1e-13) for name, p in model.named_parameters())
    mesh.free()


class Entangled(torch.nn.Module):
    """Attention that uses the matrices of its own layers, and layers in a dictionary that is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.Linear(8, 3)
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"up": torch.nn.Linear(8, 8)}) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block["up"](x)  # type: ignore[index]
        return self.head(self.attention(x, x, x)[0])


class Passing(torch.nn.Module):
    """Blocks that return their inputs, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Pass() for _ in range(2))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        before = x
        for block in self.blocks:
            x, before = block(x + before)
        return self.head(x + before)


class Pass(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Any) -> Any:
        return super().forward(x), x


@pytest.mark.parametrize("make", [Entangled, Passing])
def test_parameters_that_other_modules_use(comm: Any, make: Any) -> None:
    """With ZeRO 3 they are whole when they are used, and those of the last update."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 5, 8, generator=generator), torch.randn(6, 5, 3, generator=generator)
    model, mesh = make(), Mesh(comm, dp=-1)
    run = distribute(make(), mesh, loss=torch.nn.functional.mse_loss, zero=3)
    run.optimizer(torch.optim.SGD, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        assert abs(run.step(*own_samples(mesh, (x, y))) - float(loss.detach())) <= 1e-14
    mesh.free()


def test_options_of_groups_of_parameters(comm: Any) -> None:
    """Only matrices decay, as with two groups of torch's optimizer."""
    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": others}], 1e-2, weight_decay=0)
    mesh = Mesh(comm, dp=-1)
    run = distribute(GPT(), mesh, zero=1)
    decays = {pattern: {"weight_decay": 0.0} for pattern in ("*norm*", "*bias")}
    run.optimizer(torch.optim.AdamW, decays, lr=1e-2, weight_decay=0.5)
    for step in range(2):
        optimizer.zero_grad()
        model(*tokens(step)).backward()
        optimizer.step()
        run.step(*own_samples(mesh, tokens(step)))
    assert all((run.whole(name) - p).abs().max() <= 1e-11 for name, p in model.named_parameters())
    mesh.free()


def test_bfloat16_parameters_have_master_weights(comm: Any) -> None:
    """Losses follow those of one process within the noise of 16 bits, and parameters are sent in 16 bits."""
    mesh = Mesh(comm, dp=-1)
    run = distribute(GPT().bfloat16(), mesh, zero=2)
    run.optimizer(torch.optim.AdamW, lr=1e-2)
    reference, _ = in_one_process(plain_gpt, STEPS)
    for step in range(STEPS):
        loss = run.step(*own_samples(mesh, tokens(step)))
        assert abs(loss - reference[step][0]) <= 0.05 * reference[step][0]
    storage = run.storages[0]
    assert storage.masters is not None and storage.masters[0].dtype == torch.float32
    assert storage.layout.dtype.itemsize == 2 and VOCABULARY * HIDDEN in storage.layout.words
    mesh.free()
