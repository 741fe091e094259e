"""The words and bytes of a step beside those of its plan, to the last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars, unwrap
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from plain_models import (  # noqa: E402
    BLOCKS,
    GPT,
    HEADS,
    HIDDEN,
    LLAMA_TABLE,
    SAMPLES,
    Llama,
    LlamaBlock,
    gpt_table,
    own_samples,
    tokens,
)
from tiers import everything  # noqa: E402

from pdgemm.planning.models.model_layers import TrainingLayout, sums_by_name  # noqa: E402
from pdgemm.planning.models.model_shape import ModelShape  # noqa: E402
from pdgemm.planning.models.training_step import TrainingStep  # noqa: E402
from pdgemm.training import Experts, Mesh, MixtureOfExperts, Sequence, distribute  # noqa: E402
from pdgemm.training.layers.context import _Linear  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(2, 4)]
VOCABULARY, LENGTH, FFN, EXPERTS, TOPK = 32, 16, 40, 4, 2  # which all meshes divide, as the other sizes
AGAIN: dict[str, Any] = {"none": "none", "selective": "attention", "full": "blocks"}


def layouts(ranks: int, experts: bool = False) -> list[TrainingLayout]:
    """Return layouts of so many ranks: each mesh with each stage of ZeRO, and all else that may differ in turns."""
    meshes = [x for x in product((1, 2, 4), repeat=4) if x[0] * x[1] * x[2] * x[3] == ranks and x[3] < 4]
    listed = list[TrainingLayout]()
    for number, (dp, tp, pp, cp) in enumerate(meshes):
        for zero in range(4):
            at = number + zero
            schedule = ("1f1b", "interleaved", "zero_bubble", "gpipe")[at % 4] if pp == 2 else "1f1b"
            listed.append(
                TrainingLayout(
                    dp, tp, pp, cp, min(dp, (1, 2, 1, 4)[zero]) if experts else 1, zero=zero,
                    microbatch=SAMPLES // dp // (1, 2)[at % 3 > 0 or pp > 1], chunks=1 + (schedule == "interleaved"),
                    schedule=schedule, recompute=[*AGAIN][at % 3],  # type: ignore
                    sequence=at % 5 > 0, autograd=True, dtype=("float32", "float64")[number // 2 % 2],
                )
            )  # fmt: skip
    return listed


class Kept:
    """The bytes of the floating-point arrays that a step keeps for its backward passes, of which none is a parameter.

    Those that autograd saves, and those of products that a schedule delays.  An array is counted whole, and once.
    most : those at one time.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._users, self._bytes, self.most = model, Counter[int](), 0, 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Return a block whose steps are counted."""
        begun, saved = _Linear.backward, torch.autograd.graph.saved_tensors_hooks

        def backward(ctx: Any, dy: Any) -> Any:
            delayed = ctx.context.delayed
            before, results = len(delayed or ()), begun(ctx, dy)
            if len(delayed or ()) > before:
                used = getclosurevars(unwrap(delayed[-1])).nonlocals
                arrays = [KeptArray(self, used[name]) for name in ("left", "right")]
                delayed[-1] = partial(lambda product, _: product(), delayed[-1], arrays)
            return results

        with pytest.MonkeyPatch.context() as patch, saved(self._pack, lambda x: getattr(x, "tensor", x)):
            patch.setattr(_Linear, "backward", staticmethod(backward))
            yield

    def _pack(self, x: Any) -> Any:
        parameters = {y.untyped_storage().data_ptr() for y in self._model.parameters()}
        counted = x.is_floating_point() and x.dim() and x.untyped_storage().data_ptr() not in parameters
        return KeptArray(self, x) if counted else x

    def count(self, x: Any, more: int) -> None:
        storage = x.untyped_storage()
        users = self._users[storage.data_ptr()] = self._users[storage.data_ptr()] + more
        self._bytes += more * storage.nbytes() * (users == (more > 0))  # its first user comes, or its last one goes
        self.most = max(self.most, self._bytes)


class KeptArray:
    def __init__(self, kept: Kept, x: Any) -> None:
        self.tensor, self._kept = x, kept
        kept.count(x, 1)

    def __del__(self) -> None:
        self._kept.count(self.tensor, -1)


class ExpertBlock(LlamaBlock):
    """Attention, and experts in place of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        del self.gate, self.down
        self.up = MixtureOfExperts(HIDDEN, FFN, EXPERTS, TOPK, gated=True, activation=F.silu, balance=0.5)

    def forward(self, x: Any, rotation: Any) -> Any:
        x = x + self.attention(self.norm1(x), rotation=rotation)
        return x + self.up(self.norm2(x))


def llama_with_experts() -> Any:
    model = Llama()
    model.blocks = torch.nn.ModuleList(ExpertBlock() for _ in range(BLOCKS))
    return model


GPT_SIZES = (BLOCKS, HIDDEN, HEADS, VOCABULARY, LENGTH)
LLAMA_SIZES: dict[str, Any] = {"kv_heads": HEADS // 2, "ffn": FFN, "tied": False, "gated": True}
# models, and every how many layouts are tried without --all, from which one
SHAPES: dict[str, tuple[Any, ModelShape, slice]] = {
    "tied GPT": (GPT, ModelShape(*GPT_SIZES), slice(0, None)),
    "untied GPT": (partial(GPT, tied=False), ModelShape(*GPT_SIZES, tied=False), slice(0, None, 5)),
    "Llama": (Llama, ModelShape(*GPT_SIZES, **LLAMA_SIZES), slice(0, None, 2)),
    "Llama with experts": (
        llama_with_experts, ModelShape(*GPT_SIZES, **LLAMA_SIZES, experts=EXPERTS, topk=TOPK), slice(1, None, 2)
    ),
}  # fmt: skip


def table(shape: ModelShape, sequence: bool) -> dict[str, Any]:
    """Return placements in which linear layers of the same inputs gather them once."""
    if not shape.gated:
        return gpt_table(sequence)
    layers = {k: x for k, x in LLAMA_TABLE.items() if k not in ("*norm*", "*.gate", "*.up", "*.down")}
    layers |= {"norm": Sequence(), "*.norm1": Sequence(), "*.norm2": Sequence(gathered=not shape.experts)}
    linear = {name: LLAMA_TABLE[name] for name in ("*.gate", "*.up", "*.down")}
    return layers | ({"*.up": Experts()} if shape.experts else linear)


@pytest.mark.parametrize("name", SHAPES)
def test_words_and_bytes_of_a_step_are_those_of_its_plan(comm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bytes of ZeRO, and of what backward passes need, but for integers and tables of rotary positions.

    Where products are delayed, within a tenth: layers share inputs, and a pass that begins has not freed its own.
    """
    monkeypatch.setattr("plain_models.VOCABULARY", VOCABULARY)
    monkeypatch.setattr("plain_models.LENGTH", LENGTH)
    make, shape, tried = SHAPES[name]
    for layout in layouts(comm.size, shape.experts > 0)[slice(None) if everything() else tried]:
        plan = TrainingStep(shape, layout, SAMPLES)
        if plan.lies() or (shape.gated and layout.tp > 1 and not layout.sequence):
            continue
        mesh = Mesh(comm, dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
        model, stage = make().to(getattr(torch, layout.dtype)), mesh.index("pp")
        run = distribute(
            model, mesh, table(shape, layout.sequence), zero=layout.zero, schedule=layout.schedule,
            microbatches=plan.microbatches, chunks=layout.chunks, blocks="blocks", recompute=AGAIN[layout.recompute],
            bucket_bytes=4000,
        )  # fmt: skip
        run.optimizer(torch.optim.AdamW)
        batch, kept = own_samples(mesh, tokens(0)), Kept(model)
        with kept.counting():
            run.step(*batch)
        counted = {kind: x.words_received for kind, x in mesh.traffic.items() if kind != "decisions"}
        if shape.experts:  # tokens are not dealt out evenly, but where nothing is moved
            kept = Kept(model)
            with kept.counting():
                counted["experts"] = run.expected(*batch)["experts"].words_received
        assert {k: n for k, n in counted.items() if n} == plan.words_of(stage), (layout, name)
        planned = plan.bytes_of(stage)
        state = sums_by_name(x.layout.bytes(x.line.rank, 2) for x in run.storages)
        assert state.items() <= planned.items(), (layout, name)
        tables = 2 * LENGTH // layout.cp * HIDDEN // HEADS * 4 if shape.gated and layout.recompute != "full" else 0
        kept_bytes = planned["activations"] + planned["scores"] + plan.in_flight(stage) * tables
        bound = 0.1 if layout.schedule == "zero_bubble" else 0
        assert abs(kept.most - kept_bytes) <= bound * kept_bytes, (layout, name)
        mesh.free()
