"""What a training program records for `pdgemm verify-training`.  This file needs torch and safetensors only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d
from torch.utils import _python_dispatch, _pytree

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


class TorchCollectives(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block of code whose collectives of torch.distributed are counted: `with TorchCollectives() as counted:`.

    counts : the number of calls by kind, ranks, and words: the elements of the whole vector, which is gathered, summed,
        exchanged or sent.  Of all_to_all this is the larger one of the vectors that the rank sends and receives.

    Messages between two ranks, gathers to one rank and barriers are not counted, nor what compiled code calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[tuple[str, int, int]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_parts = any(hasattr(x, "full_tensor") for x in types)  # a DTensor then calls collectives of its parts
        result = NotImplemented if has_parts else function(*args, **(kwargs or {}))
        name = function.name().replace("_", "")
        for kind in (x for x in get_args(Kind) if name.startswith(("c10d", "dtensor")) and x.replace("_", "") in name):
            boxed = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
            group = c10d.ProcessGroup.unbox(boxed) if boxed is not None else c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
            sizes = ([x.numel() for x in _pytree.tree_leaves(y) if torch.is_tensor(x)] for y in (*args, result))
            self.counts[kind, group.size(), max(map(sum, sizes))] += 1
        return result


def record(
    folder: str | Path, step: int, loss: Any = None, *, norm: Any = None, rank: int | None = None,
    tensors: torch.nn.Module | Mapping[str, torch.Tensor] | None = None, collectives: Mapping[Any, int] | None = None,
) -> None:  # fmt: skip
    """Record a step of this rank.  Collective where loss, norm or tensors are DTensors; else any ranks may call it.

    folder  : of this run; a new one for each run.
    step    : from 1, recorded after the update.  Step 0 is before the first update, and has no loss.
    loss    : the mean loss of all samples of the step.   norm : of the gradients, before they are clipped.
    tensors : whole parameters by name, and gradients by the name of the parameter and ".grad".  Of a module all
        parameters, and the gradients that they have.
    collectives : the number of calls by kind, ranks and words, such as the counts of `TorchCollectives`.
    rank    : the number of this rank; by default that of torch.distributed, or 0 without it.

    Appends a line to folder/rank-R.jsonl, and writes tensors to folder/rank-R.step-S.safetensors.
    """
    if isinstance(tensors, torch.nn.Module):
        named = dict(tensors.named_parameters())
        tensors = {**named, **{f"{name}.grad": x.grad for name, x in named.items() if x.grad is not None}}
    rank = rank if rank is not None else c10d.get_rank() if c10d.is_initialized() else 0
    counts = [(*key, calls) for key, calls in (collectives or {}).items()]
    line = {"step": step, "loss": _whole(loss), "norm": _whole(norm), "collectives": counts}
    copies = {name: _whole(x).detach().cpu().clone().contiguous() for name, x in (tensors or {}).items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line, default=lambda x: x.item()) + "\n")
    if copies:
        save_file(copies, Path(folder) / f"rank-{rank}.step-{step}.safetensors")


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x
