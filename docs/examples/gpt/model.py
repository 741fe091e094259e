"""A transformer that predicts the next byte of a text: its layers, forward and backward, as one rank computes them.

The network is GPT-2's (Radford et al., 2019): layer norms before attention and before two linear layers, learned
positions.  With experts, the two linear layers are a mixture of experts (Fedus, Zoph & Shazeer, JMLR 23, 2022).  What
is divided among ranks, and what moves, is a matter of the layers of `pdgemm.parallel.layers`; `Transformer` is what a
pipeline runs.
"""

from dataclasses import dataclass

import numpy as np

from pdgemm.parallel import layers, layers_of


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.   kv_heads : of keys and values, 0: as many as heads.   experts : 0: no mixture."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 0
    vocabulary: int = 256
    sequence: int = 128
    experts: int = 0
    topk: int = 2
    capacity: float = 1.25
    tied: bool = True
    dropout: float = 0.0

    @property
    def keys(self):
        return self.kv_heads or self.heads

    @property
    def width(self):
        """The features of a head."""
        return self.hidden // self.heads

    @property
    def inner(self):
        """The features between the two linear layers."""
        return 4 * self.hidden


class Piece:
    """A part of the model that a rank computes at once: it has no arrays, and is forwarded several microbatches.

    forward  : returns the output for `x`, and puts into `kept` what the passes back need.
    backward : returns the gradient by `x` from that by the output.
    weights  : adds the gradients of the parameters, from what the first two have kept; at once, or later.
    p and g are parameters and gradients by name, `batch` the microbatch.
    """

    number = 0  # of a layer; the beginning and the end have 0, and other places of dropout

    def __init__(self, model):
        self.model, self.sizes = model, model.sizes

    def named(self, arrays, *names):
        """Return arrays of this piece as vectors and matrices."""
        own = (arrays[f"{self.number}.{name}"] for name in names)
        return [x.reshape(len(x), -1) if x.ndim == 3 else x for x in own]

    def dropped(self, x, batch, place=0):
        """Return x with dropout: it depends on the step, the layer, the place, the token and the feature alone."""
        if not self.sizes.dropout:
            return x
        stream = (batch.step * (self.sizes.layers + 1) + self.number) * 3 + place
        return layers.dropout(x, self.sizes.dropout, self.model.seed, stream, batch.order, np.arange(x.shape[1]))

    def add_norm(self, name, g, ready, gradients):
        for part, gradient in zip(("gain", "bias"), gradients):
            g[f"{name}.{part}"] += gradient
            ready(f"{name}.{part}")


class Beginning(Piece):
    """The embedding of each token and of its position."""

    def forward(self, p, x, batch, kept):
        self.model.table = p["embedding"]
        x = self.model.embedding.forward(batch.ids, self.model.table)
        return self.dropped(x + layers.table_rows(p["positions"], batch.positions), batch)

    def backward(self, p, dx, batch, kept):
        kept["dx"] = self.dropped(dx, batch)

    def weights(self, g, ready, batch, kept):
        layers.add_table_rows(kept["dx"], batch.positions, g["positions"])
        ready("positions")
        self.model.embedding.backward(kept["dx"], batch.ids, g["embedding"])
        if self.model.shares_table:
            g["embedding"][...] += self.model.dtable
            self.model.dtable[:] = 0
        ready("embedding")


class Layer(Piece):
    """Attention, and two linear layers or experts, each behind a layer norm and beside the identity."""

    EXPERTS = "router", "w1", "b1", "w2", "b2"

    def __init__(self, model, number):
        super().__init__(model)
        self.number = number
        if self.sizes.experts:
            how = {"activation": "gelu_tanh", "sequence": model.sequence}
            self.experts = layers.Experts(model.mesh, self.sizes.experts, self.sizes.topk, self.sizes.capacity, **how)

    def forward(self, p, x, batch, kept):
        model, t = self.model, batch.tokens
        kept["y1"], kept["norm1"] = layers.layernorm(x, *self.named(p, "norm1.gain", "norm1.bias"))
        w, b = self.named(p, "qkv.weight", "qkv.bias")
        qkv, _ = model.qkv.forward(kept["y1"], w, b.ravel(), tokens=t)
        kept["heads"] = model.heads_of(qkv, batch.samples)
        kept["out"], kept["attention"] = model.attention(kept["heads"])
        x = self.added(model.out, kept["out"], *self.named(p, "out.weight", "out.bias"), x, batch, 1)
        kept["y2"], kept["norm2"] = layers.layernorm(x, *self.named(p, "norm2.gain", "norm2.bias"))
        if self.sizes.experts:
            y, kept["experts"] = self.experts.forward(
                kept["y2"], batch.order - batch.first, self.of_experts(p), batch.divisor
            )
            return x + self.dropped(y, batch, 2)
        w, b = self.named(p, "up.weight", "up.bias")
        kept["u"], kept["z"] = model.up.forward(kept["y2"], w, b, activation="gelu_tanh", tokens=t)
        return self.added(model.down, kept["u"], *self.named(p, "down.weight", "down.bias"), x, batch, 2)

    def backward(self, p, dx, batch, kept):
        model, dy, t = self.model, self.dropped(dx, batch, 2), batch.tokens
        if self.sizes.experts:
            dy, kept["experts"] = self.experts.input_gradient(dy, kept["experts"], self.of_experts(p), batch.scale)
        else:
            w, gelu = self.named(p, "down.weight")[0], {"activation": "gelu_tanh", "aux": kept.pop("z")}
            dz, kept["down"] = model.down.input_gradient(dy, w, **gelu, tokens=t)
            dy, kept["up"] = model.up.input_gradient(dz, self.named(p, "up.weight")[0], tokens=t)
        dy, *kept["norm2"] = layers.layernorm_backward(dy, kept["norm2"], *self.named(p, "norm2.gain"))
        dx = dx + dy
        w = self.named(p, "out.weight")[0]
        dy, kept["after"] = model.out.input_gradient(self.dropped(dx, batch, 1), w, tokens=t)
        gradients = model.attention_backward(dy, kept.pop("heads"), kept.pop("attention"))
        dy, kept["qkv"] = model.qkv.input_gradient(gradients, self.named(p, "qkv.weight")[0], tokens=t)
        dy, *kept["norm1"] = layers.layernorm_backward(dy, kept["norm1"], *self.named(p, "norm1.gain"))
        return dx + dy

    def weights(self, g, ready, batch, kept):
        model = self.model
        if self.sizes.experts:
            self.experts.weight_gradient(kept["experts"], self.of_experts(g))
            ready(*(f"{self.number}.{name}" for name in self.EXPERTS))
        else:
            self.add_linear(model.down, "down", g, ready, kept["down"], kept["u"])
            self.add_linear(model.up, "up", g, ready, kept["up"], kept["y2"])
        self.add_norm(f"{self.number}.norm2", g, ready, kept["norm2"])
        self.add_linear(model.out, "out", g, ready, kept["after"], kept["out"])
        self.add_linear(model.qkv, "qkv", g, ready, kept["qkv"], kept["y1"])
        self.add_norm(f"{self.number}.norm1", g, ready, kept["norm1"])

    def add_linear(self, linear, name, g, ready, later, x):
        w, b = self.named(g, f"{name}.weight", f"{name}.bias")
        linear.weight_gradient(later, x, w, b.reshape(-1))
        ready(f"{self.number}.{name}.bias", f"{self.number}.{name}.weight")

    def added(self, linear, x, w, b, residual, batch, place):
        """Return residual + dropout(x w + b)."""
        if not self.sizes.dropout:
            return linear.forward(x, w, b, residual=residual, tokens=batch.tokens)[0]
        return residual + self.dropped(linear.forward(x, w, b, tokens=batch.tokens)[0], batch, place)

    def of_experts(self, arrays):
        return {name: arrays[f"{self.number}.{name}"] for name in self.EXPERTS}


class End(Piece):
    """The last layer norm, the scores of all tokens that may come next, and the loss."""

    def forward(self, p, x, batch, kept):
        kept["y"], kept["norm"] = layers.layernorm(x, p["norm.gain"], p["norm.bias"])
        scores, _ = self.model.scores.forward(kept["y"], self.matrix(p), tokens=batch.tokens)
        loss, kept["loss"] = self.model.cross_entropy.forward(scores, batch.labels)
        self.model.loss += loss

    def backward(self, p, dx, batch, kept):
        dscores = self.model.cross_entropy.backward(kept.pop("loss"), batch.scale / batch.divisor)
        dy, kept["scores"] = self.model.scores.input_gradient(dscores, self.matrix(p), tokens=batch.tokens)
        dy, *kept["norm"] = layers.layernorm_backward(dy, kept["norm"], p["norm.gain"])
        return dy

    def weights(self, g, ready, batch, kept):
        model = self.model
        dw = model.dtable.T if model.shares_table else self.matrix(g)
        model.scores.weight_gradient(kept["scores"], kept["y"], dw)
        if not model.shares_table:
            ready("embedding" if self.sizes.tied else "head")
        self.add_norm("norm", g, ready, kept["norm"])

    def matrix(self, arrays):
        """Return the weights, (hidden, tokens), which may be those of the embedding."""
        if self.model.shares_table:
            return self.model.table.T
        return arrays["embedding"].T if self.sizes.tied else arrays["head"]


class Transformer:
    """The blocks of this rank's pipeline stage, for `Pipeline.run`; `begin` names the samples of a step.

    recompute : what the backward pass computes again: "none"; "selective", the core of attention; "full", all that
        lies between the inputs of the layers.
    loss : the sum over tokens of this rank, on the last stage.
    """

    def __init__(self, sizes, buckets, schedule, *, sequence=True, recompute="none", seed=0):
        self.sizes, self.buckets, self.mesh, self.seed = sizes, buckets, buckets.mesh, seed
        self.recompute, self.schedule, self.sequence, self.loss = recompute, schedule, sequence, 0.0
        mesh, h, how = self.mesh, sizes.hidden, {"sequence": sequence}
        self.type = buckets.lines[0].layout.wide  # of activations
        self.context = layers.ContextSplit(mesh, sizes.sequence)
        self.embedding = layers.Embedding(mesh, sizes.vocabulary, h, **how)
        self.heads = layers.HeadSplit(mesh, sizes.heads, sizes.keys, sizes.width)
        self.qkv = layers.Linear(mesh, h, self.heads.columns, "columns", **how)
        self.out = layers.Linear(mesh, sizes.heads * sizes.width, h, "rows", **how)
        self.up = layers.Linear(mesh, h, sizes.inner, "columns", **how)
        self.down = layers.Linear(mesh, sizes.inner, h, "rows", **how)
        self.scores = layers.Linear(mesh, h, sizes.vocabulary, "columns", **how)
        self.cross_entropy = layers.CrossEntropy(mesh, sizes.vocabulary)
        self.shares_table = sizes.tied and mesh.shape.pp == 1  # the first piece and the last one have the same array
        self.table, self.dtable = None, np.zeros((self.embedding.own.stop - self.embedding.own.start, h), self.type)
        self.kept = {}
        self.pieces = self.pieces_of_chunks(mesh.index("pp"))

    def pieces_of_chunks(self, stage):
        """Return the pieces of each chunk of a stage; the first block has the beginning, and the last one the end."""
        schedule, pieces = self.schedule, []
        for chunk in range(schedule.chunks):
            block = chunk * schedule.stages + stage
            numbers = layers_of(self.sizes.layers, schedule.stages, schedule.chunks, stage, chunk)
            own = [Layer(self, number) for number in numbers]
            first, last = block == 0, block == schedule.stages * schedule.chunks - 1
            pieces.append([Beginning(self)] * first + own + [End(self)] * last)
        return pieces

    # ---------------------------------------------------------------- what a pipeline calls
    def begin(self, batches):
        """Take the microbatches of a step."""
        self.batches, self.loss = batches, 0.0

    def shape(self, microbatch):
        return (len(self.batches[microbatch].order), self.sizes.hidden), self.type

    def forward(self, microbatch, chunk, x):
        batch, kept = self.batches[microbatch], []
        with self.buckets.forward():
            for piece in self.pieces[chunk]:
                y = piece.forward(self.buckets.parameters, x, batch, record := {})
                kept.append(self.kept_of(piece, record, x))
                x = y
        self.kept[microbatch, chunk] = kept
        return x

    def kept_of(self, piece, record, x):
        """Return what is kept of a piece: all, all but the core of attention, or its input alone."""
        if isinstance(piece, Layer) and self.recompute == "full":
            return {"x": x}
        if isinstance(piece, Layer) and self.recompute == "selective":
            record["attention"] = None
        return record

    def backward(self, microbatch, chunk, dx):
        batch, splits = self.batches[microbatch], self.schedule.split
        with self.buckets.backward():
            for piece, kept in zip(self.pieces[chunk][::-1], self.kept[microbatch, chunk][::-1]):
                if "x" in kept:
                    piece.forward(self.buckets.parameters, kept.pop("x"), batch, kept)
                dx = piece.backward(self.buckets.parameters, dx, batch, kept)
                if not splits:
                    piece.weights(self.buckets.gradients, self.buckets.ready, batch, kept)
                    kept.clear()
        if not splits:
            del self.kept[microbatch, chunk]
        return dx

    def weights(self, microbatch, chunk):
        batch = self.batches[microbatch]
        for piece, kept in zip(self.pieces[chunk][::-1], self.kept.pop((microbatch, chunk))[::-1]):
            piece.weights(self.buckets.gradients, self.buckets.ready, batch, kept)

    # ---------------------------------------------------------------- attention
    def heads_of(self, qkv, samples):
        """Return queries of this rank's positions, and keys and values of all, for `attention`."""
        q, k, v = self.heads.split(qkv, samples)
        return q, self.context.gather(k), self.context.gather(v)

    def attention(self, heads):
        """Return the weighted values, a row for each token, and what the backward pass needs."""
        out, kept = layers.attention(*heads, self.context.positions, self.context.all_positions)
        return self.heads.rows(out), kept

    def attention_backward(self, dy, heads, kept):
        """Return the gradient by `qkv`."""
        if kept is None:  # it is computed again
            kept = self.attention(heads)[1]
        dq, dk, dv = layers.attention_backward(self.heads.by_head(dy, len(heads[0])), kept)
        return self.heads.joined(dq, self.context.reduce(dk), self.context.reduce(dv))
