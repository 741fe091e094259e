"""Torch modules without a word of ranks, their tables of placements, and their training in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pdgemm.training import Columns, Gathered, Mesh, Positions, Replicated, Rows, Sequence, Vocabulary

VOCABULARY, LENGTH, HIDDEN, HEADS, BLOCKS, SAMPLES = 31, 13, 24, 4, 4, 12


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2: learned positions, and scores by the matrix of the embedding if it is tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for x in self.parameters():
            nn.init.normal_(x, 1.0 if x.dim() == 1 else 0.0, 0.2)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.view(-1, scores.size(-1)), labels.reshape(-1))


class RMSNorm(nn.Module):
    """x / rms(x) times a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((HIDDEN,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Rotation(nn.Module):
    """Cosines and sines of rotary positions."""

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = HIDDEN // HEADS
        angles = positions[:, None] / 100.0 ** (torch.arange(0, width, 2) / width).repeat(2)
        return angles.cos(), angles.sin()


class LlamaAttention(nn.Module):
    """Grouped keys with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN // 2, bias=False)
        self.value, self.out = nn.Linear(HIDDEN, HIDDEN // 2, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, HIDDEN // HEADS)  # derives the number of positions from its inputs
        q, k, v = (linear(x).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.value))
        q, k = (y * rotation[0] + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * rotation[1] for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class LlamaBlock(nn.Module):
    """Attention, and a gated pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = RMSNorm(), RMSNorm(), LlamaAttention()
        self.gate, self.up = nn.Linear(HIDDEN, 40, bias=False), nn.Linear(HIDDEN, 40, bias=False)
        self.down = nn.Linear(40, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), rotation=rotation)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama's layers: RMSNorm, rotary positions, grouped keys, gated linear layers, an untied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.rotation = nn.Embedding(VOCABULARY, HIDDEN), Rotation()
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(BLOCKS))
        self.norm, self.head = RMSNorm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        x, rotation = self.embedding(ids), self.rotation(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, rotation)
        scores = self.head(self.norm(x))
        return {"loss": F.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1))}


class Perceptron(nn.Module):
    """Two linear layers: a model that returns predictions and not a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(LENGTH, 20), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def gpt_table(sequence: bool = True) -> dict[str, Any]:
    """Return the placements of a GPT.   sequence : divide activations between layers along tp."""
    norms = Sequence() if sequence else Replicated()
    return {
        "embedding": Vocabulary(), "position": Positions(), "*.qkv": Columns(parts=3, heads=HEADS), "*.out": Rows(),
        "*.up": Columns(), "*.down": Rows(), "*norm*": norms, "head": Vocabulary(),
    }  # fmt: skip


LLAMA_TABLE = {
    "embedding": Vocabulary(), "rotation": Positions(heads=True), "*.attention": Gathered(),
    "*.query": Columns(heads=HEADS), "*.key": Columns(heads=HEADS // 2), "*.value": Columns(heads=HEADS // 2),
    "*.out": Rows(), "*.gate": Columns(), "*.up": Columns(), "*.down": Rows(), "*norm*": Sequence(),
    "head": Vocabulary(),
}  # fmt: skip


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and the labels of a step; some labels are ignored."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    labels = x[:, 1:].clone()
    labels[:, 0] = -100
    return x[:, :-1].contiguous(), labels


def own_samples(mesh: Mesh, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the samples of this replica."""
    return [x.tensor_split(mesh.shape.dp)[mesh.index("dp")] for x in batch]


@cache
def in_one_process(
    make: Callable[[], nn.Module], steps: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Return the losses and the norms of the gradients of steps of AdamW in one process, and the parameters after."""
    model = make().double()
    optimizer, results = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        optimizer.zero_grad()
        result = model(*tokens(step))
        loss = result["loss"] if isinstance(result, dict) else result
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results.append((float(loss.detach()), float(norm)))
    return results, {name: x.detach() for name, x in model.named_parameters()}
