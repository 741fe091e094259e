"""What a training program records for `pdgemm verify-training`.  This file needs torch and safetensors only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed


def record(
    folder: str | Path, step: int, loss: Any = None, *, norm: Any = None, rank: int | None = None,
    tensors: torch.nn.Module | Mapping[str, torch.Tensor] | None = None, collectives: Mapping[Any, float] | None = None,
) -> None:  # fmt: skip
    """Record a step of this rank.  Collective where loss, norm or tensors are DTensors; else any ranks may call it.

    folder  : of this run; a new one for each run.
    step    : from 1, recorded after the update.  Step 0 is before the first update, and has no loss.
    loss    : the mean loss of all samples of the step.   norm : of the gradients, before they are clipped.
    tensors : whole parameters by name, and gradients by the name of the parameter and ".grad".  Of a module all
        parameters, and the gradients that they have.
    collectives : their numbers or bytes by name, such as `CommDebugMode().get_comm_counts()` of torch.
    rank    : the number of this rank; by default that of torch.distributed, or 0 without it.

    Appends a line to folder/rank-R.jsonl, and writes tensors to folder/rank-R.step-S.safetensors.
    """
    if isinstance(tensors, torch.nn.Module):
        named = dict(tensors.named_parameters())
        tensors = {**named, **{f"{name}.grad": x.grad for name, x in named.items() if x.grad is not None}}
    if rank is None:
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    line = {
        "step": step,
        "loss": _whole(loss),
        "norm": _whole(norm),
        "collectives": {str(x): n for x, n in (collectives or {}).items()},
    }
    copies = {name: _whole(x).detach().cpu().clone().contiguous() for name, x in (tensors or {}).items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line, default=lambda x: x.item()) + "\n")
    if copies:
        save_file(copies, Path(folder) / f"rank-{rank}.step-{step}.safetensors")


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x
