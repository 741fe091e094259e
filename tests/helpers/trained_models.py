"""Runs of plain models on meshes, compared with one process of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from plain_models import in_one_process, own_samples, tokens

from pdgemm.training import Mesh, Named, Run, distribute

STEPS = 3
GPT2_NAMES = {
    "embedding.weight": "wte.weight", "position.weight": "wpe.weight", "norm.*": "ln_f.*",
    "blocks.*.qkv.weight": Named("h.*.attn.c_attn.weight", transposed=True),
    "blocks.*.qkv.bias": "h.*.attn.c_attn.bias",
    "blocks.*.out.weight": Named("h.*.attn.c_proj.weight", transposed=True),
    "blocks.*.out.bias": "h.*.attn.c_proj.bias",
    "blocks.*.up.weight": Named("h.*.mlp.c_fc.weight", transposed=True), "blocks.*.up.bias": "h.*.mlp.c_fc.bias",
    "blocks.*.down.weight": Named("h.*.mlp.c_proj.weight", transposed=True),
    "blocks.*.down.bias": "h.*.mlp.c_proj.bias",
    "blocks.*.norm1.*": "h.*.ln_1.*", "blocks.*.norm2.*": "h.*.ln_2.*", "*.attn.bias": None,
}  # fmt: skip
LLAMA_NAMES = {
    "embedding.weight": "model.embed_tokens.weight", "norm.gain": "model.norm.weight", "head.weight": "lm_head.weight",
    "blocks.*.norm1.gain": "model.layers.*.input_layernorm.weight",
    "blocks.*.norm2.gain": "model.layers.*.post_attention_layernorm.weight",
    "blocks.*.attention.query.weight": "model.layers.*.self_attn.q_proj.weight",
    "blocks.*.attention.key.weight": "model.layers.*.self_attn.k_proj.weight",
    "blocks.*.attention.value.weight": "model.layers.*.self_attn.v_proj.weight",
    "blocks.*.attention.out.weight": "model.layers.*.self_attn.o_proj.weight",
    "blocks.*.gate.weight": "model.layers.*.mlp.gate_proj.weight",
    "blocks.*.up.weight": "model.layers.*.mlp.up_proj.weight",
    "blocks.*.down.weight": "model.layers.*.mlp.down_proj.weight", "*.inv_freq": None,
}  # fmt: skip


@contextmanager
def float64() -> Iterator[None]:
    """Return a block in which new tensors are float64, and torch computes on one thread."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


def trained(comm: Any, make: Callable[[], Any], table: Any, mesh: Any, **options: Any) -> tuple[Run, list[Any]]:
    """Return a run after some steps, and the losses and norms."""
    mesh = Mesh(comm, **mesh)
    run = distribute(make(), mesh, table, **options)
    run.optimizer(torch.optim.AdamW, lr=1e-2)
    results = [(run.step(*own_samples(mesh, tokens(step)), clip=1.0), run.norm) for step in range(STEPS)]
    return run, results


def check(run: Run, results: list[Any], make: Callable[[], Any], how: Any) -> None:
    """Compare losses, norms and parameters with those of one process."""
    expected, parameters = in_one_process(make, STEPS)
    for (loss, norm), (true_loss, true_norm) in zip(results, expected):
        assert abs(loss - true_loss) <= 1e-12 * true_loss and abs(norm - true_norm) <= 1e-12 * true_norm, how
    for name in run.parameters:
        x = run.whole(name)
        assert x.shape == parameters[name].shape, (name, how)
        assert (x - parameters[name]).abs().max() <= 1e-10, (name, how)  # AdamW divides by roots of small squares


def refused(comm: Any, kind: type[Exception], match: str, model: Any, table: Any = None, **options: Any) -> None:
    """Check that `distribute` raises the same error on all ranks, and does not change the model."""
    mesh, before = Mesh(comm, **options.pop("mesh", {"tp": comm.size})), state(model)
    with pytest.raises(kind, match=match) as error:
        distribute(model, mesh, table, **options)
    assert len({*comm.allgather(str(error.value))}) == 1
    assert state(model) == before
    mesh.free()


def state(model: Any) -> list[Any]:
    """Return the attributes of all modules, with replaced forward passes, and the memory of all parameters."""
    attributes = [(name, key, id(x)) for name, module in model.named_modules() for key, x in vars(module).items()]
    return attributes + [(name, x.data_ptr(), x.shape, x.requires_grad) for name, x in model.named_parameters()]
