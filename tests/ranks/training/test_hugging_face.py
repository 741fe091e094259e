"""Models of Hugging Face, which nobody here wrote, by a table alone: losses and norms of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
import plain_models as plain  # noqa: E402
from plain_models import own_samples  # noqa: E402
from trained_models import GPT2_NAMES, LLAMA_NAMES, float64  # noqa: E402

from pdgemm.training import Columns, Gathered, Mesh, Named, Positions, Rows, Sequence, Vocabulary, distribute  # noqa: E402
from pdgemm.training.layers.scores import Scores  # noqa: E402

pytestmark = pytest.mark.mpi
TOKENS, LENGTH, SIDE = 37, 12, 32
LLAMA = {
    "model.model.embed_tokens": Vocabulary(), "model.model.rotary_emb": Positions(heads=True),
    "*.self_attn": Gathered(), "*.mlp": Gathered(), "*.q_proj": Columns(heads=4), "*.k_proj": Columns(heads=2),
    "*.v_proj": Columns(heads=2), "*.o_proj": Rows(), "*.gate_proj": Columns(), "*.up_proj": Columns(),
    "*.down_proj": Rows(), "*norm": Sequence(), "model.lm_head": Vocabulary(),
}  # fmt: skip
GPT2 = {
    "model.transformer.wte": Vocabulary(), "model.transformer.wpe": Positions(), "*.mlp": Gathered(),
    "*.attn": Gathered("split_size", "num_heads"), "*.c_attn": Columns(parts=3, heads=4), "*.attn.c_proj": Rows(),
    "*.c_fc": Columns(), "*.mlp.c_proj": Rows(), "*.ln_[12]": Sequence(), "*.ln_f": Sequence(gathered=True),
    "model.lm_head": Vocabulary(),
}  # fmt: skip


class WithLabels(torch.nn.Module):
    """A language model of Hugging Face whose batch is one tensor of tokens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        common: dict[str, Any] = {"vocab_size": TOKENS, "use_cache": False, "attn_implementation": "sdpa"}
        if name == "llama":
            sizes = {"hidden_size": SIDE, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
            config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32, **common)
            self.model = transformers.LlamaForCausalLM(config)
        else:
            sizes = {"n_embd": SIDE, "n_layer": 4, "n_head": 4, "n_positions": 32}
            rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, **common))

    def forward(self, x: Any) -> Any:
        return self.model(input_ids=x, labels=x)


def batch(step: int) -> Any:
    return torch.randint(0, TOKENS, (8, LENGTH), generator=torch.Generator().manual_seed(step))


@pytest.mark.on_ranks(2, 4)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_table_is_enough(comm: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each mesh of dp, tp, pp and cp; GPT-2 reshapes by the length of its inputs, so that cp does not divide it."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)  # the loss of the library is computed in float32
    monkeypatch.setattr(Scores, "float", lambda x: x)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        reference = WithLabels(name)
        optimizer, expected = torch.optim.AdamW(reference.parameters(), lr=1e-2), []
        for step in range(3):
            optimizer.zero_grad()
            loss = reference(batch(step)).loss
            loss.backward()
            expected.append((float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))))
            optimizer.step()
        table, blocks = (LLAMA, "model.model.layers") if name == "llama" else (GPT2, "model.transformer.h")
        for axis in ("tp", "pp", "cp", "dp") if name == "llama" else ("tp", "pp"):
            axes = {"dp": -1} if axis == "dp" else {axis: 2, "dp": -1}
            mesh = Mesh(comm, **axes)
            run = distribute(WithLabels(name), mesh, table, zero=3, microbatches=2, blocks=blocks)
            run.optimizer(torch.optim.AdamW, lr=1e-2)
            for step, (loss, norm) in enumerate(expected):
                ours = run.step(*own_samples(mesh, (batch(step),)), clip=1.0)
                assert abs(ours - loss) <= 1e-12 * loss and abs(run.norm - norm) <= 1e-12 * norm, (axes, step)
            mesh.free()
    finally:
        torch.set_default_dtype(torch.float32)


def of_the_library(name: str) -> Any:
    """Return a model of the library of the sizes of a plain one, with large weights."""
    torch.manual_seed(4)
    words, side, heads, blocks = plain.VOCABULARY, plain.HIDDEN, plain.HEADS, plain.BLOCKS
    if name == "llama":
        sizes = {
            "hidden_size": side,
            "intermediate_size": 40,
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
        }
        others = {"num_key_value_heads": heads // 2, "rope_theta": 100.0, "rms_norm_eps": 1e-6}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=words, **sizes, **others))
    else:
        sizes = {"n_embd": side, "n_layer": blocks, "n_head": heads, "n_positions": plain.LENGTH}
        config = transformers.GPT2Config(vocab_size=words, activation_function="gelu", **sizes)
        model = transformers.GPT2LMHeadModel(config)
    for x in model.parameters():
        torch.nn.init.normal_(x, 1.0 if x.dim() == 1 else 0.0, 0.2)
    return model.eval()


def with_prefix(value: Any) -> Any:
    """Return names in the file of the model with its head."""
    return replace(value, names=f"transformer.{value.names}") if isinstance(value, Named) else f"transformer.{value}"


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_files_of_the_library(comm: Any, name: str, shared_tmp_path: Path) -> None:
    """A module of one's own has the loss of the library's model, from its file, and writes that file again."""
    make, table, names = plain.Llama, plain.LLAMA_TABLE, LLAMA_NAMES
    if name == "gpt2":
        make, table = plain.GPT, plain.gpt_table()
        names = {key: value and with_prefix(value) for key, value in GPT2_NAMES.items()}
    with float64():
        model, (x, labels) = of_the_library(name), plain.tokens(0)
        if comm.rank == 0:
            model.save_pretrained(shared_tmp_path)
        comm.Barrier()
        scores = model(x).logits.flatten(0, 1).detach()
        expected = float(torch.nn.functional.cross_entropy(scores, labels.flatten()))
        for axes in ({"tp": comm.size}, {"pp": comm.size}):
            run = distribute(make(), Mesh(comm, **axes), table, blocks="blocks", zero=1)
            run.load(shared_tmp_path / "model.safetensors", names=names)
            run.save(shared_tmp_path / "again.safetensors", names=names)
            assert abs(run.step(x, labels) - expected) <= 1e-6 * expected  # the library rotates in float32
        if comm.rank == 0:
            one, other = (safetensors.load_file(shared_tmp_path / f"{x}.safetensors") for x in ("model", "again"))
            assert one.keys() == other.keys() and all(torch.equal(x, other[key]) for key, x in one.items())
