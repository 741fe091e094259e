"""The best layouts of a transformer, and `pdgemm model`, which prints them and refuses bad questions.  No MPI."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import product

import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st
from planned_models import A100, GPT3, H100
from tiers import examples, third

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.known_machines import accelerator
from pdgemm.planning.machines.machine import HOST
from pdgemm.planning.models.model_layers import TrainingLayout
from pdgemm.planning.models.model_plan import AGAIN, NODE, LayoutSearch, ModelPlan
from pdgemm.planning.models.model_shape import PRESETS, ModelShape
from pdgemm.planning.published import published_models
from pdgemm.planning.published.published_products import read_table
from pdgemm.schedules.training.mesh_shape import MeshShape
from pdgemm.tools.cli.commands import cli

MIDDLE = ModelShape(24, 4096, 32, 51200, 2048)
QUESTION = shlex.split(
    "model --layers 96 --hidden 12288 --heads 96 --sequence 2048 --vocabulary 51200 --batch 1536 --ranks 128 "
    "--ranks-per-node 8 --machine a100-80"
)


def output(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [*words])
    assert result.exit_code == code or (code == 2 and isinstance(result.exception, ArgumentError)), result.output
    return str(result.exception) if isinstance(result.exception, ArgumentError) else result.output


def test_published_layouts_are_near_the_best() -> None:
    """SC 2021's ten are within 10% of the best of what ran there: no ZeRO, and at most as many blocks a stage."""
    early = published_models._OF_2021
    for row in third([*read_table("megatron_sc21_table1")]):
        shape, batch, chunks = published_models._shape(row), int(row["batch_sequences"]), int(row["virtual_stages"])
        layout = published_models._layout(row, chunks, microbatch=int(row["microbatch"]), **early)
        plan = ModelPlan(shape, layout, batch, A100)
        assert not plan.refused
        plans = LayoutSearch(shape, batch, layout.ranks, A100, ("full",), (0,), TrainingLayout(**early)).plans()
        best = min(x.step_seconds for x in plans if not x.refused and x.layout.chunks <= chunks)
        assert plan.step_seconds <= 1.1 * best, row


def test_the_nearest_miss_needs_the_least() -> None:
    search = LayoutSearch(ModelShape(**PRESETS["llama3-8b"]), 64, 4, replace(A100, memory=24e9))
    choice = search.best()
    assert choice.nearest and not choice.best
    assert choice.nearest.all_bytes == min(x.all_bytes for x in search.plans())


def test_an_all_reduce_that_is_hidden_is_tried() -> None:
    """With one stage on GPUs, where stage 1 or 2 of ZeRO hides half of its words; never with several, or on hosts."""
    search = LayoutSearch(MIDDLE, 512, 64, A100)
    best = {x.layout.mesh: x.layout for x in search.best(100).best}
    assert best[MeshShape(dp=16, tp=4)].zero == 0 and best[MeshShape(dp=64)].zero == 2
    for machine in (A100, replace(A100, device=HOST)):
        whole = {x.layout.mesh for x in replace(search, machine=machine).plans() if not x.layout.zero}
        assert all((x.pp == 1) == (machine.device != HOST) for x in whole if x.dp > 1)


def test_tensor_parallelism_stays_on_a_node() -> None:
    for machine, ranks in ((A100, 512), (H100, 64)):
        best = LayoutSearch(GPT3, 1536, ranks, machine).best().best
        assert best and all(x.link("tensor") == NODE for x in best[:3]), (machine.name, ranks)
    assert sum(1 for _ in LayoutSearch(GPT3, 1536, 1024, A100).plans()) <= 2500  # each takes some 100 us


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([16, 64, 256]), st.sampled_from([64, 512]), st.floats(20e9, 200e9), st.floats(1.0, 4.0),
    st.sampled_from(["a100-40", "h100"]),
)  # fmt: skip
def test_more_memory_is_never_worse(ranks: int, batch: int, memory: float, factor: float, name: str) -> None:
    machines = [replace(accelerator(name), memory=size) for size in (memory, factor * memory)]
    little, much = (LayoutSearch(MIDDLE, batch, ranks, machine).best(1).best for machine in machines)
    if little:
        assert much and much[0].step_seconds <= little[0].step_seconds * (1 + 1e-12)
        assert little[0].all_bytes >= 16 * MIDDLE.parameters / ranks


def test_the_least_that_fits_is_computed_again() -> None:
    machine, fixed = replace(accelerator("h100"), memory=4.5e9), TrainingLayout(fused=False)
    search = LayoutSearch(ModelShape(24, 1024, 16, 50257, 1024), 64, 8, machine, fixed=fixed)
    alone = (replace(search, recompute=(x,)).plans() for x in AGAIN)
    fastest = [next((x for x in tried if not x.refused), tried[-1]) for tried in zip(*alone)]
    assert [x.layout for x in search.plans()] == [x.layout for x in fastest]
    assert {(x.layout.recompute, bool(x.refused)) for x in fastest} == {*product(AGAIN, [False]), ("full", True)}
    for recompute in ((), ("full", "none"), ("none", "none"), ("all",), "full"):
        with pytest.raises(ArgumentError, match="recompute is some of none, selective, full, in this order"):
            replace(search, recompute=recompute)


def test_the_command() -> None:
    text = output(*QUESTION, "--tokens", "300e9", "--price", "2")
    for part in (r"layout", "MFU", "174,615,846,912 parameters", "GB of a rank:", "tensor", "days", "a million tokens"):
        assert part in text, text
    layouts = json.loads(output(*QUESTION, "--json"))["layouts"]
    seconds = [sum(x["seconds"].values()) for x in layouts]
    assert len(seconds) == 10 and seconds == sorted(seconds)
    assert json.loads(output(*QUESTION, "--json", "--layout", layouts[0]["layout"]))["layouts"] == layouts[:1]
    ways = (("", "--no-fused"), (",fused=no", ""), ("", ""))
    apart = [output(*QUESTION, "--layout", f"tp=8,pp=16{more}", *words.split()) for more, words in ways]
    assert apart[0] == apart[1] != apart[2]
    muon = output(*QUESTION, "--layout", "tp=8,pp=16", "--optimizer", "muon")
    assert "newton_schulz" in muon and "owners" in muon and "owners" not in apart[2]
    assert "at most" in output("model", "--check")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "0 is not in the range"),
        ("--heads 7", "heads 7 does not divide hidden 12288"),
        (
            "--machine b200",
            "the machines are xeon-24, piz-daint-mc, piz-daint-omp, epyc-128, a100-40, a100-80, h100 and files",
        ),
        ("--memory much", "'much' is not of the form 2GiB, 500MB or 1000000"),
        ("--memory 1GB", "no layout of 128 ranks fits: "),
        ("--preset gpt5", "'gpt5' is not one of 'gpt3-175b', "),
        ("--layout dp=3", "needs 3 ranks, not 128"),
        ("--layout dp=128,colour=1", "the names are dp, tp, pp"),
        ("--layout dp=128,zero=x", "zero of a layout is a whole number"),
        ("--layout tp=8,pp=16,microbatch=5", "does not divide the 1536 samples"),
        ("--layout dp=128,fused=perhaps", "fused of a layout is yes or no, got 'perhaps'"),
        ("--layout dp=128,schedule=2f2b", "2f2b"),
        ("--layout pp=128,chunks=2,schedule=1f1b", "2 blocks of layers a stage take an interleaved schedule"),
        ("--layout dp=2,pp=64,chunks=1,microbatch=256,schedule=interleaved", "interleaved "),
        ("--layout tp=64,pp=2", "tp 64 does not divide 96 heads"),
        ("--layout pp=128", "128 blocks of layers are more than 96 layers"),
        ("--batch 7 --ranks 11 --layers 1", "dp may be 1"),
        ("model", "--layers, --hidden, --heads, --vocabulary, --sequence (or --preset, which has all sizes), --ranks"),
        ("model --preset llama3-8b", "missing options: --ranks (or --layout)"),
        ("model --layers 2 --heads 2 --ranks 3", "missing options: --hidden, --vocabulary, --sequence (or --preset"),
    ],
)
def test_bad_questions(words: str, message: str) -> None:
    """One line with the possible values or all that is missing, and exit code 2."""
    asked = words.split() if words.startswith("model") else [*QUESTION, *words.split()]
    assert message in " ".join(output(*asked, code=2).split())


def test_a_step_has_a_million_tokens_unless_a_batch_is_named() -> None:
    """Of 8192 tokens a sample; each rank has as many samples, and one at least."""
    many = "--layout dp={},zero=3,recompute=full"
    for words, batch in (("--ranks 8", 128), (many.format(24), 120), (many.format(1000), 1000)):
        facts = json.loads(output(*shlex.split(f"model --preset llama3-8b {words} --json")))
        assert facts["batch"] == batch and facts["layouts"]


def test_what_does_not_fit_is_told_in_words() -> None:
    text = output(*shlex.split("model --preset llama3-8b --ranks 8"))
    assert re.search(r"^\d+ layouts fit. Of \d+ others, dp=\S+ comes closest: [\d.]+ GB, [\d.]+% too much$", text, re.M)
    assert re.search(r"^dp=\S+: \d+ microbatches of \d+ per rank, \d+ in flight$", text, re.M)
    one = output(*shlex.split("model --preset llama3-8b --batch 8 --layout dp=8,zero=3,microbatch=1"))
    assert ": 1 microbatch of 1 per rank, 1 in flight" in one
