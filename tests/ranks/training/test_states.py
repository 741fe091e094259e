"""States of a run: any mesh continues what another has saved, with the numbers of a run that was not interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from plain_models import GPT, HEADS, HIDDEN, LLAMA_TABLE, Llama, gpt_table, own_samples, tokens  # noqa: E402
from tiers import everything  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from trained_models import GPT2_NAMES, LLAMA_NAMES, float64  # noqa: E402

from pdgemm.errors import ArgumentError, FileError  # noqa: E402
from pdgemm.io import hdf5  # noqa: E402
from pdgemm.io.many_datasets import ManyDatasets  # noqa: E402
from pdgemm.parallel.sampler import Sampler  # noqa: E402
from pdgemm.training import LossScale, Mesh, Named, Run, distribute  # noqa: E402

pytestmark = pytest.mark.mpi
BEFORE, AFTER = 2, 2  # steps before and after a state is saved
AXES = "dp", "tp", "pp", "cp"


@pytest.fixture(autouse=True)
def _types() -> Iterator[None]:
    with float64():
        yield


@pytest.fixture(scope="module")
def safetensors() -> Any:
    return pytest.importorskip("safetensors.torch")


def ways(size: int) -> list[dict[str, Any]]:
    """Return meshes and ZeRO stages for a number of ranks."""
    split = {"zero": 3, "schedule": "zero_bubble", "microbatches": 2}
    several = [{"dp": size, "zero": 2}, {"pp": size, **split}, {"cp": size, "zero": 1}, {"dp": size, "zero": 0}]
    if size % 2 == 0:
        several += [{"tp": 2, "dp": size // 2, "zero": 3}]
    if size == 4:
        several += [{"tp": 2, "pp": 2, "zero": 1}]
    return several if size > 1 else several[:2]


def run_of(comm: Any, how: dict[str, Any], make: Callable[[], Any] = GPT, table: Any = None, **options: Any) -> Run:
    """Return a new run on a mesh."""
    mesh = Mesh(comm, **{axis: n for axis, n in how.items() if axis in AXES})
    others = {name: x for name, x in how.items() if name not in AXES}
    return distribute(make(), mesh, gpt_table() if table is None else table, blocks="blocks", **others, **options)


def with_adamw(run: Run) -> Any:
    """Return a scheduler of AdamW, which lets norms decay less."""
    optimizer = run.optimizer(torch.optim.AdamW, {"*norm*": {"weight_decay": 0.1}}, lr=1e-2, weight_decay=0.5)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def trained(run: Run, scheduler: Any, steps: range) -> list[float]:
    """Return the losses of steps."""
    losses = []
    for step in steps:
        losses.append(run.step(*own_samples(run.mesh, tokens(step)), clip=1.0))
        scheduler.step()
    return losses


@cache
def in_one_process() -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return the losses of all steps of plain torch, and the parameters before and after the last steps."""
    model = GPT()
    named = [*model.named_parameters()]
    norms = [x for name, x in named if "norm" in name]
    groups = [{"params": norms, "weight_decay": 0.1}, {"params": [x for name, x in named if "norm" not in name]}]
    optimizer, losses, states = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5), list[float](), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            states.append({name: x.clone() for name, x in model.state_dict().items()})
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, states[0], model.state_dict()


def close(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-10) -> bool:
    """Return whether two mappings have the same names, shapes, and elements within a tolerance."""
    assert [*one] == [*other]
    return all(x.shape == other[name].shape and (x - other[name]).abs().max() <= tolerance for name, x in one.items())


@pytest.mark.on_ranks(1, 2, 3, 4)
def test_any_mesh_continues_what_another_has_saved(comm: Any, shared_tmp_path: Path) -> None:
    """With each mesh and ZeRO stage, in both formats, also where the optimizer has made other steps before."""
    losses, _, end = in_one_process()
    files = list[Path]()
    for number, how in enumerate(ways(comm.size)):
        run = run_of(comm, how)
        scheduler = with_adamw(run)
        np.testing.assert_allclose(trained(run, scheduler, range(BEFORE)), losses[:BEFORE], rtol=1e-12)
        files.append(shared_tmp_path / f"{number}.{('h5', 'safetensors')[number % 2]}")
        run.save(files[-1], extra={"scheduler": scheduler.state_dict()})
        run.mesh.free()
    for number, how in enumerate(ways(comm.size)):
        run = run_of(comm, how)
        scheduler = with_adamw(run)
        some = comm.size > 2 and not everything()  # cores have several ranks each
        for file in (files[number - 1], files[number - 2]) if some else files:
            scheduler.load_state_dict(run.load(file)["scheduler"])
            assert run.steps == BEFORE
            after = trained(run, scheduler, range(BEFORE, BEFORE + AFTER))
            np.testing.assert_allclose(after, losses[BEFORE:], rtol=1e-12, err_msg=f"{how} from {file}")
        whole = run.state_dict()
        assert close(whole, end) if comm.rank == 0 else whole == {}
        run.mesh.free()


def test_torch_continues_what_a_mesh_has_trained_and_a_mesh_what_torch_has(comm: Any) -> None:
    losses, state, _ = in_one_process()
    for how in ways(comm.size):
        run = run_of(comm, how)
        scheduler = with_adamw(run)
        trained(run, scheduler, range(BEFORE))
        whole = run.state_dict()
        if comm.rank == 0:
            model = GPT()
            model.load_state_dict(whole)
            assert abs(float(model(*tokens(BEFORE)).detach()) - losses[BEFORE]) <= 1e-12 * losses[BEFORE]
            assert whole["head.weight"].data_ptr() == whole["embedding.weight"].data_ptr()
        run.mesh.free()
        run = run_of(comm, how)
        run.load_state_dict(state if comm.rank == 0 else {})
        assert abs(run.step(*own_samples(run.mesh, tokens(BEFORE))) - losses[BEFORE]) <= 1e-12 * losses[BEFORE]
        run.mesh.free()


def test_master_weights_of_bfloat16(comm: Any, shared_tmp_path: Path) -> None:
    """Other meshes have the same master weights and moments, bit by bit, and the same mesh the same losses."""
    first, *others = ways(comm.size)[:3]
    run = run_of(comm, first, lambda: GPT().bfloat16())
    scheduler = with_adamw(run)
    trained(run, scheduler, range(BEFORE))
    run.save(shared_tmp_path / "0.h5")
    after = trained(run, scheduler, range(BEFORE, BEFORE + AFTER))
    whole, path = run.state_dict(), shared_tmp_path / "0.h5"
    for number, how in enumerate([*others, first], 1):
        run = run_of(comm, how, lambda: GPT().bfloat16())
        scheduler = with_adamw(run)
        run.load(path)
        path = shared_tmp_path / f"{number}.{('h5', 'safetensors')[number % 2]}"
        run.save(path)
    if path.suffix == ".h5":
        saved = [hdf5.load_all(x, run.mesh.grid).matrices for x in (shared_tmp_path / "0.h5", path)]
        assert all(np.array_equal(x.allgather(), saved[1][name].allgather()) for name, x in saved[0].items())
        assert {x.dtype for x in saved[0].values()} == {np.dtype(np.float32)}
    assert trained(run, scheduler, range(BEFORE, BEFORE + AFTER)) == after
    again = run.state_dict()
    assert all(x.dtype is torch.bfloat16 and torch.equal(x, again[name]) for name, x in whole.items())


class Counting(nn.Module):
    """A layer with buffers, a number and a frozen array of three dimensions beside its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 5), nn.Parameter(torch.tensor(0.5))
        self.filters = nn.Parameter(torch.randn(2, 3, 4), requires_grad=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(1, 5))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.passes += 1
            self.mean += 0.25
        return self.scale * torch.tanh(self.linear(x)) + self.filters.sum()


class Chain(nn.Module):
    """Blocks with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("ending", ["h5", "safetensors"])
def test_buffers_and_arrays_of_any_shape(comm: Any, shared_tmp_path: Path, ending: str) -> None:
    """A stage has the buffers of its own blocks, which are saved with those of other stages."""
    options, path = {"table": {}, "loss": nn.functional.mse_loss}, shared_tmp_path / f"x.{ending}"
    x, y = torch.ones(8, 5), torch.zeros(8, 5)
    for rule in (torch.optim.NAdam, torch.optim.Adagrad):
        losses = []
        for how in ({"pp": comm.size, "zero": 1}, {"dp": comm.size, "zero": 3}):
            run = run_of(comm, how, Chain, **options)
            run.optimizer(rule, lr=0.1)
            if how.get("dp"):
                run.load(path)
                whole = run.state_dict()
                if comm.rank == 0:
                    assert [int(whole[f"blocks.{at}.passes"]) for at in range(4)] == [2] * 4
                    assert whole["blocks.3.passes"].dtype is torch.int64
                    assert whole["blocks.3.mask"].dtype is torch.bool
                    assert bool((whole["blocks.3.mean"] == 0.5).all()) and whole["blocks.3.mask"].all()
                    assert torch.equal(whole["blocks.3.filters"], Chain().blocks[3].filters)
            for _ in range(2):
                run.step(*own_samples(run.mesh, (x, y)))
            if how.get("pp"):
                run.save(path)
                losses += [run.step(*own_samples(run.mesh, (x, y))) for _ in range(2)]
        assert run.steps == 4
        run.load(path)
        np.testing.assert_allclose([run.step(*own_samples(run.mesh, (x, y))) for _ in range(2)], losses, rtol=1e-12)
        run.mesh.free()


def refused(comm: Any, match: str, call: Callable[[], Any], kind: type[Exception] = ArgumentError) -> None:
    """Check that a call raises the same error on all ranks."""
    with pytest.raises(kind, match=match) as error:
        call()
    assert len({*comm.allgather(str(error.value))}) == 1


def test_states_of_other_models_change_nothing(comm: Any, shared_tmp_path: Path) -> None:
    run = run_of(comm, {"dp": comm.size, "zero": 1})
    with_adamw(run)
    run.step(*own_samples(run.mesh, tokens(0)))
    before, path = run.state_dict(), shared_tmp_path / "x.h5"
    other = run_of(comm, {"dp": comm.size}, Llama, LLAMA_TABLE)
    other.save(path)
    refused(comm, "has no optimizer with 0 groups.*here it is AdamW with 2", lambda: run.load(path))
    with_adamw(other)
    other.step(*own_samples(other.mesh, tokens(0)))
    other.save(path, sampler=Sampler(50, 10, seed=1))
    found = (
        r"without position.weight \(13, 24\), .* others; with other blocks.0.up.weight \(40, 24\) float64 in place of "
        r"\(96, 24\), .*; with more .*blocks.0.attention.query.weight \(24, 24\) float64, .* others$"
    )
    refused(comm, found, lambda: run.load(path))
    for sampler in (Sampler(50, 10, seed=2), Sampler(51, 10, seed=1)):
        refused(comm, "has the sampler .*'seed': 1", lambda: other.load(path, sampler=sampler))  # noqa: B023
    refused(comm, "the name of a state ends with .h5", lambda: run.save(shared_tmp_path / "x.pt"))
    refused(comm, "No such file", lambda: run.load(shared_tmp_path / "y.h5"), FileError)
    refused(comm, "JSON", lambda: run.save(path, extra=run), TypeError)
    wrong = {name: torch.cat([x, x]) if name == "norm.bias" else x for name, x in before.items() if "0.up" not in name}
    wrong["more"] = torch.zeros(3)
    found = (
        r"without blocks.0.up.weight \(96, 24\), .*; with other norm.bias \(48,\) float64 in place of \(24,\); "
        r"with more more \(3,\) float64$"
    )
    refused(comm, found, lambda: run.load_state_dict(wrong))
    after = run.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items()) and run.steps == 1
    assert other.load(path, sampler=Sampler(50, 10, seed=1)) is None


class FirstElements(torch.optim.SGD):
    """A rule that keeps some elements of each parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for x in self.param_groups[0]["params"]:
            self.state[x]["first"] = x.detach()[:1].clone()


@pytest.mark.parametrize("ending", ["h5", "safetensors"])
def test_what_cannot_be_saved_leaves_the_former_file(
    comm: Any, shared_tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses elements, and an optimizer that keeps one number of each row of its part."""
    path = shared_tmp_path / f"x.{ending}"
    run = run_of(comm, {"dp": comm.size, "zero": 1})
    run.optimizer(FirstElements, lr=0.1)
    run.save(path)
    before = by_rank_0(comm, path.read_bytes)
    run.step(*own_samples(run.mesh, tokens(0)))
    found = r"'first' of FirstElements is torch.Size.*: states have numbers and tensors, of parts only of their shapes"
    refused(comm, found, lambda: run.save(path))
    with_adamw(run)

    def lost(*_: Any) -> None:
        raise FileError("the disk has other elements")

    monkeypatch.setattr(ManyDatasets, "check_elements", lost)
    refused(comm, "the disk has other elements", lambda: run.save(path), FileError)
    assert by_rank_0(comm, path.read_bytes) == before and [*shared_tmp_path.iterdir()] == [path]


def by_rank_0(comm: Any, call: Callable[[], Any]) -> Any:
    """Return the result of a call on rank 0, on all ranks."""
    return comm.bcast(call() if comm.rank == 0 else None)


def test_files_of_gpt_2(comm: Any, shared_tmp_path: Path, safetensors: Any) -> None:
    """Its matrices are transposed, some are square, and a file may have masks; other programs read what is written."""
    plain, path = GPT().state_dict(), shared_tmp_path / "model.safetensors"
    where = {
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "norm1": "ln_1",
        "norm2": "ln_2",
    }
    there = {"wte.weight": plain["embedding.weight"], "wpe.weight": plain["position.weight"]}
    there |= {f"ln_f.{x}": plain[f"norm.{x}"] for x in ("weight", "bias")}
    for name, x in plain.items():
        if name.startswith("blocks"):
            _, block, layer, kind = name.split(".")
            x = x.T.contiguous() if x.dim() == 2 else x
            there[f"h.{block}.{where[layer]}.{kind}"] = x.to(torch.float32)
    masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 3, 3) for block in range(4)}
    by_rank_0(comm, lambda: safetensors.save_file(there | masks, path))
    for how in ways(comm.size):
        run = run_of(comm, how)
        for piece in run.updates.parts:
            piece.weights.data.zero_()
        assert run.load(path, names=GPT2_NAMES) is None
        whole = run.state_dict()
        assert not whole or close(whole, plain, 1e-6)
        out = shared_tmp_path / "out.safetensors"
        run.save(out, names=GPT2_NAMES)
        written = by_rank_0(comm, lambda: safetensors.load_file(out))  # noqa: B023
        assert {name: x.dtype for name, x in written.items()} == dict.fromkeys(there, torch.float64)
        assert all(torch.equal(x.double(), written[name]) for name, x in there.items())
        run.mesh.free()
    without = {name: x for name, x in GPT2_NAMES.items() if name not in ("*.attn.bias", "blocks.*.up.bias")}
    run = run_of(comm, how)
    refused(comm, "no pattern for blocks.0.up.bias, .*blocks.3.up.bias", lambda: run.load(path, names=without))
    without["blocks.*.up.bias"] = None
    refused(comm, r": with more .*h.0.mlp.c_fc.bias", lambda: run.load(path, names=without))
    turned = GPT2_NAMES | {"blocks.*.up.weight": "h.*.mlp.c_fc.weight"}
    refused(
        comm,
        r"with other h.0.mlp.c_fc.weight \(24, 96\) float32 in place of \(96, 24\)",
        lambda: run.load(path, names=turned),
    )
    twice = GPT2_NAMES | {"blocks.*.norm2.*": "h.*.ln_1.*"}
    refused(comm, "stores several parameters as h.0.ln_1.weight, h.0.ln_1.bias", lambda: run.save(out, names=twice))
    for table, message in (
        ({"layers.*": "*"}, "no parameter matches 'layers.*'"),
        ({"blocks.*.up.weight": "h.*.*"}, r"'h.\*.\*' of the table of names needs a \* for each of 0"),
        ({("blocks.*.up.weight", "blocks.*.up.gain"): "h.*"}, "'blocks.0.up.gain' is not a parameter"),
    ):
        others = {name: x for name, x in GPT2_NAMES.items() if name not in table}
        refused(comm, message, partial(run.load, path, names=table | others))


def test_matrices_in_parts_and_in_another_order(comm: Any, shared_tmp_path: Path, safetensors: Any) -> None:
    """[q | k | v] here and three there, three here and one there, pairs of rotary features, and heads in turns."""
    path, width = shared_tmp_path / "model.safetensors", HIDDEN // HEADS
    plain = Llama().state_dict()
    names = dict.fromkeys(("query", "key", "value"), "blocks.*.attention.{}.weight")
    three = tuple(pattern.format(name) for name, pattern in names.items())
    one = {x: y for x, y in LLAMA_NAMES.items() if x not in three} | {three: "model.layers.*.qkv.weight"}
    run = run_of(comm, ways(comm.size)[-1], Llama, LLAMA_TABLE)
    run.save(path, names=one)
    there = by_rank_0(comm, lambda: safetensors.load_file(path))
    joined = torch.cat([plain[name.replace("*", "2")] for name in three])
    assert torch.equal(there["model.layers.2.qkv.weight"], joined)
    run = run_of(comm, ways(comm.size)[0], lambda: zeroed(Llama()), LLAMA_TABLE)
    run.load(path, names=one)
    assert close(run.state_dict() or plain, plain, 0.0)
    pairs = Named("model.layers.*.self_attn.q_proj.weight", view=(HEADS, 2, -1), axes=(0, 2, 1))
    run.save(path, names=LLAMA_NAMES | {three[0]: pairs})
    there = by_rank_0(comm, lambda: safetensors.load_file(path))["model.layers.1.self_attn.q_proj.weight"]
    for head in range(HEADS):
        for at in range(width // 2):
            for half in range(2):
                mine = plain["blocks.1.attention.query.weight"][head * width + 2 * at + half]
                assert torch.equal(there[head * width + half * width // 2 + at], mine)
    run = run_of(comm, ways(comm.size)[0], lambda: zeroed(Llama()), LLAMA_TABLE)
    run.load(path, names=LLAMA_NAMES | {three[0]: pairs})
    assert close(run.state_dict() or plain, plain, 0.0)
    plain = GPT().state_dict()
    parts = Named(("h.*.q", "h.*.k", "h.*.v"))
    turns = Named("h.*.turns", view=(HEADS, 3, -1), axes=(1, 0, 2))
    run = run_of(comm, ways(comm.size)[0])
    table = {"blocks.*.qkv.weight": parts, "blocks.*.qkv.bias": turns, "*": "*"}
    run.save(path, names=table)
    there = by_rank_0(comm, lambda: safetensors.load_file(path))
    assert torch.equal(there["h.3.k"], plain["blocks.3.qkv.weight"][HIDDEN : 2 * HIDDEN])
    assert torch.equal(there["h.3.turns"][3 * width : 4 * width], plain["blocks.3.qkv.bias"][width : 2 * width])
    run = run_of(comm, ways(comm.size)[-1], lambda: zeroed(GPT()))
    run.load(path, names=table)
    assert close(run.state_dict() or plain, plain, 0.0)
    shares = Named(("h.*.q", "h.*.k", "h.*.v"), shares=(2, 1, 1))
    refused(
        comm,
        r"h.0.q \(24, 24\) float64 in place of \(36, 24\)",
        lambda: run.load(path, names={**table, "blocks.*.qkv.weight": shares}),
    )


def zeroed(model: Any) -> Any:
    """Return a model whose parameters are 0."""
    for x in model.parameters():
        x.data.zero_()
    return model


def test_several_files_with_an_index(comm: Any, shared_tmp_path: Path, safetensors: Any) -> None:
    run = run_of(comm, {"dp": comm.size}, lambda: zeroed(GPT()))
    plain = GPT().state_dict()
    del plain["head.weight"]  # of the embedding

    def write() -> None:
        names = [*plain]
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in parts.items():
            safetensors.save_file({name: plain[name] for name in own}, shared_tmp_path / file)
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (shared_tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    by_rank_0(comm, write)
    run.load(shared_tmp_path / "model.safetensors.index.json")
    assert close(run.state_dict() or GPT().state_dict(), GPT().state_dict(), 0.0)


def test_a_loader_of_torch_continues_with_another_number_of_replicas(comm: Any, shared_tmp_path: Path) -> None:
    """In the middle of an epoch: each sample once; the batch may change, too, and loaders read ahead."""
    data, seen, path = TensorDataset(torch.arange(60.0)[:, None]), list[float](), shared_tmp_path / "x.h5"
    for replicas, batch, last in ((2, 6, 4), (1, 6, 6), (3, 12, 8)):
        mesh, sampler = Mesh(comm, dp=-1), Sampler(60, batch, seed=5)
        run = distribute(nn.Linear(1, 1), mesh, loss=nn.functional.mse_loss)
        run.optimizer(torch.optim.SGD, lr=1e-3)
        if seen:
            run.load(path, sampler=sampler)
        steps = range(run.steps, last)
        loaders = [
            DataLoader(data, batch_sampler=sampler.batches(steps, index, replicas), num_workers=index)
            for index in range(replicas)
        ]
        assert {*map(len, loaders)} == {len(steps)}
        for parts in zip(*loaders):
            assert {len(x) for (x,) in parts} == {batch // replicas}
            x = torch.cat([x for (x,) in parts])
            seen += x.flatten().tolist()
            run.step(*own_samples(mesh, (x, x)))
        run.save(path, sampler=sampler)
        mesh.free()
    assert sorted(seen) == [*range(60)] and seen != sorted(seen)
    one = [row for step in range(10) for row in Sampler(60, 6, seed=5).rows(step)]
    assert seen == one


@pytest.mark.on_ranks(2, 4)
def test_owners_of_whole_matrices_and_several_rules(comm: Any, shared_tmp_path: Path) -> None:
    """Three meshes in turn, with owners along tp, late parameters and a loss scale, have the losses of one run."""
    adamw, momentum = (
        partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    )  # fmt: skip
    rules, ways, losses = {"blocks.*.[ud]*.weight": momentum, "*": adamw}, list[dict[str, Any]](), list[float]()
    ways += [{"dp": comm.size}, {"tp": 2, "dp": -1, "zero": 1, "whole": True, "loss_scale": LossScale()}]
    ways += [{"pp": 2, "dp": -1, "zero": 2, "whole": True, "lazy": True, "loss_scale": LossScale(2.0)}]
    ways += [{"tp": 2, "dp": -1, "zero": 3, "whole": True}]
    for number, how in enumerate(ways):
        run = run_of(comm, how)
        run.optimizer(rules)
        if number > 1:
            run.load(shared_tmp_path / f"{number - 1}.h5")
        for step in range(5) if number == 0 else range((0, 2, 4)[number - 1], (2, 4, 5)[number - 1]):
            losses.append(run.step(*own_samples(run.mesh, tokens(step)), clip=1.0))
        run.save(shared_tmp_path / f"{number}.h5")
        if number == 2:
            assert run.updates.scale.value == 2.0**16 and run.updates.scale.steps == 4
        run.mesh.free()
    assert np.allclose(losses[:5], losses[5:], rtol=1e-13, atol=0)


class Mix(nn.Module):
    """A product with two matrices, which are one parameter of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN) / 5)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(x @ self.weight[0]) @ self.weight[1]


class Mixed(Llama):
    """Without biases of keys, whose gradients are 0: Adafactor would divide rounding by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(self.norm, Mix())  # type: ignore[assignment]


@pytest.mark.on_ranks(2, 4)
def test_states_of_other_shapes_than_parameters(comm: Any, shared_tmp_path: Path) -> None:
    """Adafactor's sums of rows and columns, of matrices and of two matrices in one, on four meshes in turn: torch's."""
    ways: list[dict[str, Any]] = [{"dp": comm.size}, {"tp": 2, "dp": -1, "zero": 1, "whole": True}]
    ways += [{"pp": 2, "dp": -1, "zero": 2, "whole": True}, {"tp": 2, "dp": -1, "zero": 3, "whole": True}]
    model, rule = Mixed(), partial(torch.optim.Adafactor, lr=1e-2)
    theirs, path = rule(model.parameters()), Path()
    for number, how in enumerate(ways):
        run = run_of(comm, how, Mixed, LLAMA_TABLE)
        run.optimizer(rule)
        if number:
            run.load(path)
        for step in (2 * number, 2 * number + 1):
            theirs.zero_grad()
            loss = model(*tokens(step))["loss"]
            loss.backward()
            theirs.step()
            assert abs(run.step(*own_samples(run.mesh, tokens(step))) - float(loss.detach())) <= 1e-12 * loss, how
        run.save(path := shared_tmp_path / f"{number}.{('h5', 'safetensors')[number % 2]}")
        assert close(run.state_dict() or model.state_dict(), model.state_dict(), 1e-9), how
        if path.suffix == ".h5":
            saved = hdf5.load_all(path, run.mesh.grid).matrices
            for name, x in model.named_parameters():
                for key in ("row_var", "col_var") if x.dim() > 1 else ("variance",):
                    array = saved[f"optimizer/{key}/{name}"].allgather()
                    assert np.allclose(array.ravel(), theirs.state[x][key].ravel(), rtol=1e-9, atol=0), (name, key)
        run.mesh.free()
