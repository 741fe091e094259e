"""How the parameters of the transformer are divided among ranks, and what a step then moves, keeps and computes.

Everything here is arithmetic of sizes: the counts of a run are compared with it to the word and the byte.
"""

from math import sqrt
from zlib import crc32

from pdgemm.parallel import Initial, Part, layers_of


def initial(sizes, mesh, schedule, *, sequence=True, seed=0, dtype="float32", apart=False):
    """Return the parameters of each chunk of this rank's stage, in the order of the forward pass: weights of variance
    0.02^2, and smaller ones where layers add to the residual, as those of GPT-2.   apart : tied on one stage, too.
    """
    h, inner, width, keys = sizes.hidden, sizes.inner, sizes.width, sizes.keys
    shared = "sum" if sequence else None  # whole on the ranks along tp; each computes its tokens' part of the gradient

    def normal(name, shape, scale=0.02):
        return Initial(shape, "normal", seed=seed_of(seed, name), scale=scale, dtype=dtype)

    def norm(name):
        return {
            f"{name}.gain": Part(Initial(h, "ones", dtype=dtype), tp=shared),
            f"{name}.bias": Part(Initial(h, dtype=dtype), tp=shared),
        }

    def layer(n):
        small = 0.02 / sqrt(2 * sizes.layers)
        columns = (sizes.heads // keys + 2) * width
        yield from norm(f"{n}.norm1").items()
        yield f"{n}.qkv.weight", Part(normal(f"{n}.qkv", (h, keys, columns)), tp=1)
        yield f"{n}.qkv.bias", Part(Initial((keys, columns), dtype=dtype), tp=0)
        yield f"{n}.out.weight", Part(normal(f"{n}.out", (sizes.heads * width, h), small), tp=0)
        yield f"{n}.out.bias", Part(Initial(h, dtype=dtype))
        yield from norm(f"{n}.norm2").items()
        if experts := sizes.experts:
            yield f"{n}.router", Part(normal(f"{n}.router", (h, experts)), tp="sum")
            yield f"{n}.w1", Part(normal(f"{n}.w1", (experts, h, inner)), ep=0)
            yield f"{n}.b1", Part(Initial((experts, inner), dtype=dtype), ep=0)
            yield f"{n}.w2", Part(normal(f"{n}.w2", (experts, inner, h), small), ep=0)
            yield f"{n}.b2", Part(Initial((experts, h), dtype=dtype), ep=0)
            return
        yield f"{n}.up.weight", Part(normal(f"{n}.up", (h, inner)), tp=1)
        yield f"{n}.up.bias", Part(Initial(inner, dtype=dtype), tp=0)
        yield f"{n}.down.weight", Part(normal(f"{n}.down", (inner, h), small), tp=0)
        yield f"{n}.down.bias", Part(Initial(h, dtype=dtype))

    stage, last, chunks = mesh.index("pp"), mesh.shape.pp - 1, []
    for chunk in range(schedule.chunks):
        numbers = layers_of(sizes.layers, schedule.stages, schedule.chunks, stage, chunk)
        chunks.append({name: part for n in numbers for name, part in layer(n)})
    embedding = Part(normal("embedding", (sizes.vocabulary, h)), tp=0, tied=sizes.tied and (apart or last > 0))
    if stage == 0:
        positions = Part(normal("positions", (sizes.sequence, h)), tp=shared)
        chunks[0] = {"embedding": embedding, "positions": positions, **chunks[0]}
    if stage == last:
        chunks[-1] |= norm("norm")
        if not sizes.tied:
            chunks[-1]["head"] = Part(normal("head", (h, sizes.vocabulary)), tp=1)
        elif last:
            chunks[-1]["embedding"] = embedding
    return chunks


def seed_of(seed, name):
    """Return a seed for each name, so that no parameter depends on which others a stage has."""
    return crc32(f"{seed} {name}".encode())
