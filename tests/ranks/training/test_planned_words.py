"""The words and bytes of a step of a GPT beside those of its plan, to the last one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from plain_models import BLOCKS, GPT, HEADS, HIDDEN, SAMPLES, gpt_table, own_samples, tokens  # noqa: E402

from pdgemm.planning.models.model_layers import sums_by_name  # noqa: E402
from pdgemm.planning.models.model_shape import ModelShape  # noqa: E402
from pdgemm.planning.models.training_layout import TrainingLayout  # noqa: E402
from pdgemm.planning.models.training_step import TrainingStep  # noqa: E402
from pdgemm.training import Mesh, distribute  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(2, 4)]
VOCABULARY, LENGTH = 32, 16  # which all meshes divide, as the other sizes
AGAIN: dict[str, Any] = {"none": "none", "selective": "attention", "full": "blocks"}


def layouts(ranks: int) -> list[TrainingLayout]:
    """Return layouts of so many ranks: each mesh with each stage of ZeRO, and all else that may differ in turns."""
    meshes = [x for x in product((1, 2, 4), repeat=4) if x[0] * x[1] * x[2] * x[3] == ranks and x[3] < 4]
    listed = list[TrainingLayout]()
    for number, (dp, tp, pp, cp) in enumerate(meshes):
        for zero in range(4):
            at = number + zero
            schedule = ("1f1b", "interleaved", "zero_bubble", "gpipe")[at % 4] if pp == 2 else "1f1b"
            listed.append(
                TrainingLayout(
                    dp, tp, pp, cp, zero=zero, microbatch=SAMPLES // dp // (1, 2)[at % 3 > 0 or pp > 1],
                    chunks=1 + (schedule == "interleaved"), schedule=schedule, recompute=[*AGAIN][at % 3],  # type: ignore
                    sequence=at % 5 > 0, autograd=True, dtype="float32",
                )
            )  # fmt: skip
    return listed


@pytest.mark.parametrize("tied", [True, False])
def test_words_of_a_step_are_those_of_its_plan(comm: Any, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr("plain_models.VOCABULARY", VOCABULARY)
    monkeypatch.setattr("plain_models.LENGTH", LENGTH)
    shape = ModelShape(BLOCKS, HIDDEN, HEADS, VOCABULARY, LENGTH, tied=tied)
    for layout in layouts(comm.size):
        plan = TrainingStep(shape, layout, SAMPLES)
        mesh = Mesh(comm, dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp)
        run = distribute(
            GPT(tied), mesh, gpt_table(layout.sequence), zero=layout.zero, schedule=layout.schedule,
            microbatches=plan.microbatches, chunks=layout.chunks, blocks="blocks", recompute=AGAIN[layout.recompute],
            bucket_bytes=4000,
        )  # fmt: skip
        run.optimizer(torch.optim.AdamW)
        run.step(*own_samples(mesh, tokens(0)))
        counted = {kind: x.words_received for kind, x in mesh.traffic.items() if kind != "decisions"}
        assert {k: n for k, n in counted.items() if n} == plan.words_of(mesh.index("pp")), (layout, tied)
        kept = sums_by_name(x.layout.bytes(x.line.rank, 2) for x in run.storages)
        assert kept.items() <= plan.bytes_of(mesh.index("pp")).items(), (layout, tied)
        mesh.free()
