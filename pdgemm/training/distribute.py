"""distribute: train a torch module on a mesh, with a table of placements; every mesh gives the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from zlib import crc32

import numpy as np
from torch import nn

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count, as_name
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule
from pdgemm.support.agreement import together
from pdgemm.support.watchdog import ending_the_job
from pdgemm.training.layers.context import Context, flat_array
from pdgemm.training.layers.experts import Experts, MixtureOfExperts
from pdgemm.training.layers.placements import ModulePlacement, Sequence, Vocabulary
from pdgemm.training.parameters import divided_parameters, storages_of, take_parts
from pdgemm.training.stages import Chain, Pipeline
from pdgemm.training.training_run import Loss, Run, Weight
from pdgemm.training.updates import LossScale, Updates

# modules that combine positions by themselves, and not by scaled_dot_product_attention
_MIXING = nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvNd
RECOMPUTE = "none", "attention", "blocks"


def distribute(
    model: nn.Module,
    mesh: Mesh,
    table: Mapping[str, ModulePlacement] | None = None,
    *,
    zero: int = 0,
    schedule: str = "1f1b",
    microbatches: int = 1,
    chunks: int = 1,
    blocks: str = "",
    recompute: str = "none",
    loss: Loss | None = None,
    weight: Weight | None = None,
    bucket_bytes: int = 1 << 22,
    hybrid: bool = False,
    lazy: bool = False,
    whole: bool = False,
    loss_scale: LossScale | None = None,
) -> Run:
    """Distribute a module on a mesh: divide its parameters, and exchange activations in its forward pass.  Collective.

    ::

        run = distribute(model, Mesh(dp=2, tp=2), {"*.up": Columns(), "*.down": Rows()}, zero=1)
        optimizer = run.optimizer(torch.optim.AdamW, lr=3e-4)
        loss = run.step(tokens, labels)

    model  : a module with the same parameters on all ranks, in the memory of the host.  It is changed: its parameters
        become this rank's parts, and forward passes become those of the placements.
    table  : patterns of module names (`fnmatch`), and their placements.  A module that no pattern matches is whole on
        all ranks along tp.  With tp > 1 or cp > 1 each module with parameters needs a placement.
    zero   : what the ranks with the same parameters divide (ZeRO): 0 nothing, 1 the state of the optimizer, 2 also
        gradients, 3 also parameters.  With 2 and 3 gradients are reduced after each microbatch.  With 3, and with
        `lazy`, parameters are complete only in calls of their own module, or of a module around it without lists; a
        step raises ArgumentError where the model uses them elsewhere, such as a matrix of a head that is not a module.
    schedule, microbatches, chunks : of the pipeline: "gpipe", "1f1b", "interleaved" or "zero_bubble"; the number of
        parts of a batch; the number of parts of a stage, for "interleaved".
    blocks : with pp > 1, the name of the list or dictionary of blocks that the stages divide.  A pass uses them in
        their order.  Modules registered before them are on the first stage, and modules after them on the last one.
    recompute : what the backward pass computes again: "none"; "attention", the results of
        `scaled_dot_product_attention`; "blocks", all results inside of `blocks`.
    loss   : a function of what the model returns and of the batch but for its first tensor, which returns the mean loss
        of a microbatch.  None: the model takes the batch, and returns the loss, or a tuple that ends with the loss, or
        a mapping or an object with the loss as "loss".
    weight : a function of a microbatch that returns its weight in the mean of the losses; None: its number of samples.
    bucket_bytes : the bytes of gradients that are reduced together.
    hybrid : hybrid sharding: neighbours along dp form groups of ep ranks.  The ranks of a group divide what `zero`
        says, and each group has a copy: parameters move only inside of a group, such as a node.  Experts, of which a
        group has one copy, are divided as without `hybrid`.  Needs zero > 0.
    lazy   : with zero = 1 or 2, a step ends before this rank has received the parameters that other ranks have updated;
        in the next step each module waits for its own.  Between steps read parameters by `Run.whole` alone.
    whole  : each parameter is updated by a rank that has all of it, as torch.optim.Muon needs.  With zero > 0 ranks
        divide the list of parameters, and not each parameter; parameters that tp divides are brought to one rank along
        tp for the update, and back.
    loss_scale : a factor of the loss, such as LossScale(), with which small gradients of float16 do not become 0; the
        update divides gradients by it.  None: no factor.

    Cost of a step: `Run.expected`, and the exchanges of the placements.
    Raises ArgumentError, MeshError or DeviceError on all ranks, with the modules and the possible values, before the
    module is changed: it can be distributed again.  Later, an exception such as a MemoryError ends the job.
    """
    with together(mesh.comm) as arguments:
        placements = _matched(model, dict(table or {}), mesh)
        as_name(recompute, "recompute", RECOMPUTE)
        plan = PipelineSchedule(schedule, mesh.shape.pp, as_count(microbatches, "microbatches", 1), chunks)
        if zero not in range(4):
            raise ArgumentError(f"zero is 0, 1, 2 or 3, got {zero!r}")
        has_experts = any(isinstance(x, Experts) for x in placements.values())
        if mesh.shape.ep > 1 and not (hybrid or has_experts):
            raise ArgumentError(f"ep {mesh.shape.ep} divides experts, and no MixtureOfExperts is placed by Experts")
        if hybrid and not zero:
            raise ArgumentError("hybrid says which ranks divide the state of a model, and with zero = 0 none do")
        if not blocks and (plan.stages > 1 or recompute == "blocks"):
            raise ArgumentError(f"pp = {plan.stages} and recompute = {recompute!r} need blocks, the name of a list")
        sequence = any(isinstance(x, Sequence) for x in placements.values()) and mesh.shape.tp > 1
        _check_modules(model, mesh, plan.microbatches, placements, sequence)
        arguments += ["distribute", *(f"{name}: {x!r}" for name, x in sorted((table or {}).items())), plan, recompute]
        arguments += [blocks, zero, as_count(bucket_bytes, "bucket_bytes", 1), hybrid, lazy, whole, loss_scale]
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            checksum = crc32(flat_array(x.contiguous()).view(np.uint8).data)
            elements = f"elements of checksum {checksum} (torch.manual_seed makes them equal on all ranks)"
            arguments += [name, tuple(x.shape), x.dtype, x.requires_grad, elements]
    context, line = Context(mesh, sequence, recompute == "attention"), mesh.line("pp")
    with together(mesh.comm):  # a module is changed where no rank refuses it
        chain = Chain(model, blocks, plan, line.rank, context, recompute == "blocks") if blocks else None
        parameters = divided_parameters(model, placements, mesh, context, chain)
    with ending_the_job(mesh.comm):  # of a MemoryError, for example
        model.is_distributed = True  # type: ignore[assignment]
        for name, placement in placements.items():
            module = model.get_submodule(name)
            if forward := placement.forward(module, context):
                module.forward = forward
        if chain:
            chain.replace_forwards(model)
        take_parts(model, parameters, mesh)
        storages = storages_of(parameters, model, mesh, zero, bucket_bytes, hybrid, whole)
        names = [name for name, _ in model.named_parameters()]  # of all stages
        updates = Updates(storages, parameters, names, whole, loss_scale)
        pipeline = Pipeline(mesh.line("pp", "pipeline"), chain, plan, context)
        return Run(model, mesh, parameters, updates, pipeline, loss, weight, lazy)


def _matched(model: nn.Module, table: Mapping[str, ModulePlacement], mesh: Mesh) -> dict[str, ModulePlacement]:
    """Return the placement of each module that a pattern matches.  Raises ArgumentError."""
    modules, placements = dict(model.named_modules()), dict[str, ModulePlacement]()
    for pattern, placement in table.items():
        if not isinstance(placement, ModulePlacement):
            raise ArgumentError(f"the table maps {pattern!r} to {placement!r}, which is not a placement")
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched:
            raise ArgumentError(f"no module matches {pattern!r}; modules are {', '.join(filter(None, modules))}")
        if twice := [name for name in matched if name in placements]:
            raise ArgumentError(f"two patterns of the table match {twice[0]!r}; the second one is {pattern!r}")
        placements |= dict.fromkeys(matched, placement)
    cut = any(isinstance(x, Vocabulary) and isinstance(modules[name], nn.Embedding) for name, x in placements.items())
    if mesh.shape.cp > 1 and not cut:
        wrong = "divides positions, and no embedding is placed by Vocabulary, which cuts them"
        raise ArgumentError(f"cp {mesh.shape.cp} {wrong}")
    for name, module in modules.items() if mesh.shape.tp > 1 or mesh.shape.cp > 1 else ():
        if name not in placements and [*module.parameters(recurse=False)]:
            raise ArgumentError(
                f"{name!r}, a {type(module).__name__}, has parameters and no placement, which the mesh "
                f"{mesh.shape.sizes} needs: Columns, Rows, Vocabulary, Sequence, Positions or Replicated"
            )
    return placements


def _check_modules(
    model: nn.Module, mesh: Mesh, microbatches: int, placements: Mapping[str, ModulePlacement], sequence: bool
) -> None:
    """Raise ArgumentError for modules whose results would depend on the mesh."""
    if getattr(model, "is_distributed", False):
        raise ArgumentError("this module was distributed before: make a new one")
    shape = mesh.shape
    for name, x in model.named_parameters():
        if not x.is_floating_point():
            raise ArgumentError(f"{name!r} has the type {x.dtype}: parameters are real floating-point numbers")
    for name, module in model.named_modules():
        what, several = f"{name!r}, a {type(module).__name__},", shape.size > 1 or microbatches > 1
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and several:
            raise ArgumentError(f"{what} has statistics of one microbatch on one rank")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and shape.tp * shape.cp > 1:
            raise ArgumentError(f"{what} drops other features on each rank of {shape.sizes}: set its p to 0")
        if isinstance(module, MixtureOfExperts) and not isinstance(placements.get(name), Experts):
            raise ArgumentError(f"{what} needs the placement Experts")
        if several and getattr(getattr(module, "config", None), "output_router_logits", False):
            raise ArgumentError(
                f"{what} balances experts for the samples of one rank: set output_router_logits to False"
            )
        if (sequence or shape.cp > 1) and name not in placements and [*module.buffers(recurse=False)]:
            raise ArgumentError(f"{what} has buffers and no placement, such as Positions for rows of positions")
        if (sequence or shape.cp > 1) and isinstance(module, _MIXING):
            raise ArgumentError(f"{what} mixes positions, of which a rank of {shape.sizes} has a part")
