"""What a step of the transformer computes, moves and keeps, by arithmetic of its sizes; a run is compared with it."""

from collections import Counter

import numpy as np
from model import Beginning, End, Layer

from pdgemm.planning.machines.machine import machine_at_hand
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.token_exchange import MICROBATCH, router_sums, run_tables
from pdgemm.schedules.training.vocabulary_schedule import VocabularySchedule


def plan_of(run):
    """Return the plan of a run by `pdgemm model`: its flops, and its seconds by the model of the machine."""
    sizes, options, shape = run.sizes, run.options, run.mesh.shape
    names = "layers", "hidden", "heads", "vocabulary", "sequence", "kv_heads", "experts", "topk", "tied", "width"
    model = ModelShape(ffn=sizes.inner, **{name: getattr(sizes, name) for name in names})
    axes = {axis: getattr(shape, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    how = {"muon_steps": run.optimizer.rule.steps} if options.optimizer == "muon" else {}
    layout = TrainingLayout(
        **axes, zero=options.zero, microbatch=max(1, options.batch // (shape.dp * options.microbatches)),
        chunks=options.chunks, schedule=options.schedule, recompute=options.recompute,
        sequence=options.sequence_parallel, fused=False, dtype=options.dtype, optimizer=options.optimizer,
        bucket_words=bucket_words(run), **how,
    )  # fmt: skip
    return ModelPlan(model, layout, options.batch, machine_at_hand())


def bucket_words(run):
    """Return the words of a bucket on the line of the matrices of layers, the same on all ranks of a stage."""
    name = next(name for name in run.buckets.divisions if name.endswith(".weight"))
    return run.buckets.line_of(name).layout.bucket_words


def expected_words(run):
    """Return the words that this rank receives in a step, by kind, beside `words_of_experts`."""
    model, mesh, words = run.model, run.mesh, Counter(tensor=0, context=0, pipeline=0, router=0)
    again, travelling = forwards(model), []
    for number, (first, last) in enumerate(run.samples()):
        samples, tokens = last - first, (last - first) * len(model.context.positions)
        for piece in (piece for chunk in model.pieces for piece in chunk):
            words.update(of_piece(model, piece, samples, tokens, again))
            if isinstance(piece, Layer) and run.sizes.experts:
                words["router"] += again * words_of_router(run, number)
        travelling.append(len(run.order(number, mesh.rank)) * run.sizes.hidden)
    moved = run.schedule.traffic(mesh.index("pp"), travelling, model.type.itemsize)
    words["pipeline"] = moved.words_received
    return dict(words)


def forwards(model):
    """Return how often a layer computes its forward pass."""
    return 2 if model.recompute == "full" else 1


def words_of_router(run, microbatch):
    """Return the words that a router receives: sums of all ranks of a microbatch, and their runs of tokens."""
    shape, experts, rank = run.mesh.shape, run.sizes.experts, run.mesh.rank
    orders = [run.order(microbatch, other) for other in shape.line(MICROBATCH, rank)]
    runs = np.array([np.count_nonzero(np.diff(order, prepend=-2) > 1) for order in orders])
    collectives = router_sums(len(runs), experts), run_tables(runs, experts)
    return sum(x.traffic(shape.index(MICROBATCH, rank)).words_received for x in collectives)


def words_of_experts(model):
    """Return the words that this rank received of experts in the last step, by what its tokens chose."""
    how = model.mesh.rank, model.sizes.hidden, model.type
    exchanges = (x.traffic(*how, forwards=forwards(model))["experts"] for x in model.exchanges)
    return sum(x.words_received for x in exchanges)


def of_piece(model, piece, samples, tokens, again):
    """Return the words of a piece for a microbatch; layers compute their forward pass `again` times."""
    rank, sizes = model.mesh.index("tp"), model.sizes
    line = tuple(range(model.mesh.shape.tp))
    vocabulary = VocabularySchedule(tokens, sizes.hidden, model.sequence, model.type, line).words(rank)

    def linear(layer):
        forward, *backward = layer.schedule(tokens, model.type).words(rank).values()
        return (again if isinstance(piece, Layer) else 1) * forward + sum(backward)

    if isinstance(piece, Beginning):
        return Counter(tensor=vocabulary["embedding"] + vocabulary["embedding_gradient"])
    if isinstance(piece, End):
        return Counter(tensor=linear(model.scores) + vocabulary["cross_entropy"])
    width = 2 * samples * model.heads.kv_heads * sizes.width  # keys and values
    context = model.context.schedule.words(model.mesh.index("cp"), width)
    layers = [model.qkv, model.out] + ([] if sizes.experts else [model.up, model.down])
    return Counter(tensor=sum(map(linear, layers)), context=again * context["gather"] + context["reduce"])


def activation_bytes(model, samples, rows):
    """Return the bytes that a layer keeps of a microbatch until its backward pass.   rows : of this rank along tp.

    | kept                                      | elements                      | recomputed       |
    |-------------------------------------------|-------------------------------|------------------|
    | input of the layer                        | rows h                        | full: this alone |
    | two layer norms: results, normalised rows | 4 rows h, and 2 rows          | full             |
    | queries, keys and values, one product     | T (heads + 2 kv_heads) d      | full             |
    | queries of grouped heads, copied          | T heads d                     | full             |
    | keys and values of all S positions, cp > 1 | 2 samples kv_heads S d       | full             |
    | weights of attention                      | samples heads positions S     | selective, full  |
    | output of attention                       | T heads d                     | full             |
    | inner features before and after GELU      | 2 T inner/tp                  | full             |

    T = samples positions, heads and kv_heads of this rank.  With cp > 1 and grouped heads the product is not kept.
    """
    sizes, heads, positions = model.sizes, model.heads, len(model.context.positions)
    tokens, h, width = samples * positions, sizes.hidden, sizes.width
    if model.recompute == "full":
        return rows * h * model.type.itemsize
    own = heads.heads * width
    elements = 4 * rows * h + 2 * rows + tokens * own
    copied, gathered = heads.heads != heads.kv_heads, model.mesh.shape.cp > 1
    if not (copied and gathered):
        elements += tokens * (own + 2 * heads.kv_heads * width)
    elements += copied * tokens * own + gathered * 2 * samples * heads.kv_heads * width * sizes.sequence
    if model.recompute == "none":
        elements += samples * heads.heads * positions * sizes.sequence
    inner = model.up.schedule(tokens, model.type).shapes(model.mesh.index("tp"))["y"][1]
    return (elements + 2 * tokens * inner) * model.type.itemsize
