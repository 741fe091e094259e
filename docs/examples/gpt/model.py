"""A GPT in plain torch: tokens and positions, blocks of attention and two linear layers, and scores of the next token.

It is written for one process, and knows nothing of ranks: train.py says how its layers are divided.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a norm and added to the activations."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.width = hidden // heads

    def forward(self, x):
        x = x + self.out(self.attention(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, qkv):
        """Return the attention of all heads.   qkv : (samples, positions, [queries | keys | values])."""
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """GPT-2.

    tied : scores are formed by the matrix of the embedding, else by a matrix of their own.
    """

    def __init__(self, layers, hidden, heads, sequence, vocabulary=256, tied=True):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide {hidden} features")
        self.embedding, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for name, x in self.named_parameters():
            if x.dim() == 2:  # results of two layers in each block are added up
                nn.init.normal_(x, std=0.02 / (2 * layers) ** 0.5 if "out" in name or "down" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(x)

    def forward(self, tokens, labels=None):
        """Return the mean cross-entropy of the labels in nats; without labels, the scores of the next tokens.

        tokens, labels : integers (samples, positions).
        """
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        if labels is None:
            return scores
        return F.cross_entropy(scores.view(-1, scores.size(-1)), labels.reshape(-1))

    @torch.no_grad()
    def written(self, tokens, count):
        """Return a sequence of tokens with `count` more, each drawn by its probability."""
        for _ in range(count):
            scores = self(tokens[None, -self.position.num_embeddings :])[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1)])
        return tokens
