"""A transformer that predicts the next byte of a text: its layers, forward and backward, as one rank computes them.

The network is GPT-2's (Radford et al., 2019): layer norms before attention and before two linear layers, learned
positions.  With experts, the two linear layers are a mixture of experts (Fedus, Zoph & Shazeer, JMLR 23, 2022).  What
is divided among ranks, and what moves, is a matter of the layers of `pdgemm.parallel.layers`; `Transformer` is what a
pipeline runs.
"""

from dataclasses import dataclass

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.parallel import layers, layers_of


def check(options, **least):
    """Raise ArgumentError where a number of the options is less than it may be."""
    for name, smallest in least.items():
        if (number := getattr(options, name)) < smallest:
            raise ArgumentError(f"{name} is {smallest} or more, got {number}")


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

    def __post_init__(self):
        check(self, heads=1, kv_heads=0, experts=0)
        check(self, hidden=self.heads)  # a head has a feature

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


class Own:
    """The gradients of a piece by their names in it; each is taken when it is needed."""

    def __init__(self, buckets, prefix):
        self.buckets, self.prefix = buckets, prefix

    def __getitem__(self, name):
        return self.buckets.gradients[self.prefix + name]

    def add(self, name, gradient):
        """Add to a gradient, which is complete then."""
        self.buckets.gradients[self.prefix + name] += gradient
        self.ready(name)

    def ready(self, *names):
        """Say that gradients are complete."""
        self.buckets.ready(*(self.prefix + name for name in names))


class Piece:
    """A part of the model that a rank computes at once: it has no arrays, and is forwarded several microbatches.

    forward  : returns the output for `x`, and puts into `kept` what the passes back need.
    backward : returns the gradient by `x` from that by the output.
    weights  : adds the gradients of the parameters, those of the last ones first, from what the first two have kept;
        at once, or later.
    p are parameters and g gradients by name, `batch` is the microbatch.
    """

    def __init__(self, model, names, number=0, prefix=""):
        self.model, self.sizes, self.names, self.number, self.prefix = model, model.sizes, names, number, prefix

    def parameters(self, backward=False):
        """Return the parameters, which are taken in the order of the pass."""
        names = self.names[::-1] if backward else self.names
        return {name.removeprefix(self.prefix): self.model.buckets.parameters[name] for name in names}

    def dropped(self, x, batch, place=0):
        """Return x with dropout: it depends on the step, the layer, the place, the token and the feature alone."""
        if not self.sizes.dropout:
            return x
        stream = (batch.step * (self.sizes.layers + 1) + self.number) * 3 + place
        return layers.dropout(x, self.sizes.dropout, self.model.seed, stream, batch.order, np.arange(x.shape[1]))

    def add_norm(self, name, g, gradients):
        for part, gradient in zip((f"{name}.bias", f"{name}.gain"), gradients[::-1]):
            g.add(part, gradient)


class Beginning(Piece):
    """The embedding of each token and of its position."""

    def forward(self, p, x, batch, kept):
        self.model.table = p["embedding"]
        x = self.model.embedding.forward(batch.ids, self.model.table)
        return self.dropped(x + layers.table_rows(p["positions"], batch.positions), batch)

    def backward(self, p, dx, batch, kept):
        kept["dx"] = self.dropped(dx, batch)

    def weights(self, g, batch, kept):
        layers.add_table_rows(kept["dx"], batch.positions, g["positions"])
        g.ready("positions")
        self.model.embedding.backward(kept["dx"], batch.ids, g["embedding"])
        if self.model.shares_table:
            g.add("embedding", self.model.dtable)
            self.model.dtable[:] = 0
        else:
            g.ready("embedding")


class Layer(Piece):
    """Attention, and two linear layers or experts, each behind a layer norm and beside the identity."""

    def __init__(self, model, number):
        prefix = f"{number}."
        names = [name for name in model.buckets.parameters if name.startswith(prefix)]
        super().__init__(model, names, number + 1, prefix)
        if self.sizes.experts:
            how = {"activation": "gelu_tanh", "sequence": model.sequence}
            self.experts = layers.Experts(model.mesh, self.sizes.experts, self.sizes.topk, self.sizes.capacity, **how)

    def forward(self, p, x, batch, kept):
        model, t = self.model, batch.tokens
        kept["y1"], kept["norm1"] = layers.layernorm(x, p["norm1.gain"], p["norm1.bias"])
        qkv, _ = model.qkv.forward(kept["y1"], flat(p["qkv.weight"]), p["qkv.bias"].ravel(), tokens=t)
        kept["heads"] = model.heads_of(qkv, batch.samples)
        kept["out"], kept["attention"] = model.attention(kept["heads"])
        x = self.added(model.out, "out", p, kept["out"], x, batch, 1)
        kept["y2"], kept["norm2"] = layers.layernorm(x, p["norm2.gain"], p["norm2.bias"])
        if self.sizes.experts:
            y, kept["experts"] = self.experts.forward(kept["y2"], batch.order, p, batch.divisor)
            return x + self.dropped(y, batch, 2)
        gelu = {"activation": "gelu_tanh", "tokens": t}
        kept["u"], kept["z"] = model.up.forward(kept["y2"], p["up.weight"], p["up.bias"], **gelu)
        return self.added(model.down, "down", p, kept["u"], x, batch, 2)

    def backward(self, p, dx, batch, kept):
        model, dy, t = self.model, self.dropped(dx, batch, 2), batch.tokens
        if self.sizes.experts:
            model.exchanges.append(kept["experts"].exchange)
            dy, kept["experts"] = self.experts.input_gradient(dy, kept["experts"], p, batch.scale)
        else:
            gelu = {"activation": "gelu_tanh", "aux": kept.pop("z")}
            dz, kept["down"] = model.down.input_gradient(dy, p["down.weight"], **gelu, tokens=t)
            dy, kept["up"] = model.up.input_gradient(dz, p["up.weight"], tokens=t)
        dy, *kept["norm2"] = layers.layernorm_backward(dy, kept["norm2"], p["norm2.gain"])
        dx = dx + dy
        dy, kept["after"] = model.out.input_gradient(self.dropped(dx, batch, 1), p["out.weight"], tokens=t)
        gradients = model.attention_backward(dy, kept.pop("heads"), kept.pop("attention"))
        dy, kept["qkv"] = model.qkv.input_gradient(gradients, flat(p["qkv.weight"]), tokens=t)
        dy, *kept["norm1"] = layers.layernorm_backward(dy, kept["norm1"], p["norm1.gain"])
        return dx + dy

    def weights(self, g, batch, kept):
        model = self.model
        if self.sizes.experts:
            self.experts.weight_gradient(kept["experts"], g, g.ready)
        else:
            self.add_linear(model.down, "down", g, kept["down"], kept["u"])
            self.add_linear(model.up, "up", g, kept["up"], kept["y2"])
        self.add_norm("norm2", g, kept["norm2"])
        self.add_linear(model.out, "out", g, kept["after"], kept["out"])
        self.add_linear(model.qkv, "qkv", g, kept["qkv"], kept["y1"])
        self.add_norm("norm1", g, kept["norm1"])

    def add_linear(self, linear, name, g, later, x):
        linear.weight_gradient(later, x, flat(g[f"{name}.weight"]), g[f"{name}.bias"].reshape(-1))
        g.ready(f"{name}.bias", f"{name}.weight")

    def added(self, linear, name, p, x, residual, batch, place):
        """Return residual + dropout(x w + b)."""
        how = {"tokens": batch.tokens} if self.sizes.dropout else {"tokens": batch.tokens, "residual": residual}
        y, _ = linear.forward(x, p[f"{name}.weight"], p[f"{name}.bias"], **how)
        return residual + self.dropped(y, batch, place) if self.sizes.dropout else y


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

    def weights(self, g, batch, kept):
        model = self.model
        dw = model.dtable.T if model.shares_table else self.matrix(g)
        model.scores.weight_gradient(kept["scores"], kept["y"], dw)
        if not model.shares_table:
            g.ready("embedding" if self.sizes.tied else "head")
        self.add_norm("norm", g, kept["norm"])

    def matrix(self, arrays):
        """Return the weights, (hidden, tokens), which may be those of the embedding."""
        if self.model.shares_table:
            return self.model.table.T
        return arrays["embedding"].T if self.sizes.tied else arrays["head"]


def flat(x):
    """Return a matrix with the rows of x."""
    return x.reshape(len(x), -1)


class Transformer:
    """The blocks of this rank's pipeline stage, for `Pipeline.run`; `begin` names the samples of a step.

    recompute : what the backward pass computes again: "none"; "selective", the core of attention; "full", all that
        lies between the inputs of the layers.
    loss : the sum over tokens of this rank, on the last stage.
    exchanges : of the tokens of a step with experts, one for each layer and microbatch.
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
        # the end has the array of the beginning, unless their gradients are added apart, as on two stages
        self.shares_table = sizes.tied and mesh.shape.pp == 1 and not buckets.divisions["embedding"].tied
        own = self.embedding.own if self.shares_table else slice(0, 0)
        self.table, self.dtable = None, np.zeros((own.stop - own.start, h), self.type)  # what the end adds to
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
            beginning, end = [Beginning(self, ["embedding", "positions"])], [End(self, self.names_of_end())]
            pieces.append(beginning * first + own + end * last)
        return pieces

    def names_of_end(self):
        matrix = [] if self.shares_table else ["embedding" if self.sizes.tied else "head"]
        return ["norm.gain", "norm.bias", *matrix]

    # ---------------------------------------------------------------- what a pipeline calls
    def begin(self, batches):
        """Take the microbatches of a step."""
        self.batches, self.loss, self.exchanges = batches, 0.0, []

    def shape(self, microbatch):
        return (len(self.batches[microbatch].order), self.sizes.hidden), self.type

    def forward(self, microbatch, chunk, x):
        batch, kept = self.batches[microbatch], []
        with self.buckets.forward(chunk):
            for piece in self.pieces[chunk]:
                y = piece.forward(piece.parameters(), x, batch, record := {})
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
        batch, split = self.batches[microbatch], self.schedule.split
        with self.buckets.backward(chunk):
            for piece, kept in zip(self.pieces[chunk][::-1], self.kept[microbatch, chunk][::-1]):
                p = piece.parameters(backward=True)
                if "x" in kept:
                    piece.forward(p, kept.pop("x"), batch, kept)
                dx = piece.backward(p, dx, batch, kept)
                if not split:
                    piece.weights(Own(self.buckets, piece.prefix), batch, kept)
                    kept.clear()
        if not split:
            del self.kept[microbatch, chunk]
        return dx

    def weights(self, microbatch, chunk):
        batch = self.batches[microbatch]
        for piece, kept in zip(self.pieces[chunk][::-1], self.kept.pop((microbatch, chunk))[::-1]):
            piece.weights(Own(self.buckets, piece.prefix), batch, kept)

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
