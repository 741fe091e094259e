"""The parameters of a model on a rank: how each is divided, and the storages in which gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pdgemm.errors import ArgumentError
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.training.flat_shards import FlatShards, owners_of
from pdgemm.training.layers.context import Context, flat_array
from pdgemm.training.layers.placements import Division, ModulePlacement
from pdgemm.training.stages import Chain
from pdgemm.training.storage import Storage

_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_ENDS = "ends"  # the axis of the first and the last stage of a pipeline


class DividedParameter(NamedTuple):
    """A parameter of this rank.

    division : how it is divided.   modules : the modules of this stage that use it.
    chunks : those of the stage with these modules, ascending.
    axes   : joined by "+", along which its gradients are summed.
    copies : the number of ranks along tp, with this one, that have the same part and compute the same gradient.
    shape  : of the whole parameter.
    """

    parameter: nn.Parameter
    division: Division
    modules: list[str]
    chunks: list[int]
    axes: str
    copies: int
    shape: torch.Size


Parameters = Mapping[str, DividedParameter]


def divided_parameters(
    model: nn.Module, placements: Mapping[str, ModulePlacement], mesh: Mesh, context: Context, chain: Chain | None
) -> dict[str, DividedParameter]:
    """Return how the parameters of this rank are divided, by name; they are not changed.

    A parameter that several modules use has the name by which torch lists it first.
    Raises ArgumentError where these modules divide it differently.
    """
    uses = dict[int, list[tuple[str, str]]]()  # by id(parameter): the modules, and the parameter's names in them
    of_modules = dict[str, Mapping[str, Division]]()  # also of modules without parameters: they may refuse
    for module_name, module in model.named_modules():
        of_modules[module_name] = placements.get(module_name, ModulePlacement()).divisions(module, context)
        for name, parameter in module.named_parameters(recurse=False):
            uses.setdefault(id(parameter), []).append((module_name, name))
    parameters = dict[str, DividedParameter]()
    for parameter in model.parameters():
        everywhere = uses[id(parameter)]
        own = [x for x in everywhere if not chain or chain.is_own(x[0])]
        if not own:
            continue
        name = ".".join(everywhere[0]).lstrip(".")
        divisions = {of_modules[module].get(at) for module, at in everywhere}
        if None in divisions:
            raise ArgumentError(f"the placement of the module with {name!r} does not divide this parameter")
        if len(divisions) > 1:
            raise ArgumentError(f"{name!r} is divided differently by its modules: {', '.join(map(repr, divisions))}")
        (division,) = divisions
        assert division is not None
        division.part(parameter.data.to("meta"), mesh.length(division.axis or "tp"), 0)  # raises where parts differ
        axes = ["edp" if division.axis == "ep" else "dp", "cp", *([division.sums] if division.sums else [])]
        if chain and chain.schedule.stages > 1:
            stages = sorted({chain.place(module)[0] for module, _ in everywhere})
            if any(chain.contains(module) for module, _ in everywhere):
                raise ArgumentError(f"{name!r} belongs to a module that contains the blocks: which stage has it?")
            if len(stages) > 1 and stages != [0, chain.schedule.stages - 1]:
                raise ArgumentError(
                    f"{name!r} is used by stages {', '.join(map(str, stages))}: only the ends may share"
                )
            axes += [_ENDS] * (len(stages) > 1)
        copies, shape = 1 if division.axis or division.sums else context.tp.size, parameter.shape
        chunks = sorted(chain.place(module)[1] for module, _ in own) if chain else [0]  # the first one comes last back
        modules = [x for x, _ in own]
        parameters[name] = DividedParameter(parameter, division, modules, chunks, "+".join(axes), copies, shape)
    return parameters


def take_parts(model: nn.Module, parameters: Parameters, mesh: Mesh) -> None:
    """Replace all parameters by this rank's parts; parameters of other stages become empty."""
    divisions = {id(x.parameter): x.division for x in parameters.values()}
    for x in model.parameters():
        if division := divisions.get(id(x)):
            line = mesh.line(division.axis or "tp")
            x.data = division.part(x.data, line.size, line.rank).clone(memory_format=torch.contiguous_format)
        else:
            x.data = x.data.new_full((0,) * x.dim(), torch.nan)
            x.requires_grad_(False)


def storages_of(
    parameters: Parameters, model: nn.Module, mesh: Mesh, zero: int, bucket_bytes: int, hybrid: bool, whole: bool
) -> list[Storage]:
    """Return storages for all parameters: one for each line along which gradients are summed, and each type.

    hybrid : parameters are divided among the ranks along ep, and copied along edp.
    whole  : a rank of the line updates whole parameters, and not parts of them.
    """
    groups = dict[tuple[str, str, int], dict[str, DividedParameter]]()
    for name, x in reversed([*parameters.items()]):
        if x.parameter.requires_grad:
            groups.setdefault((x.axes, str(x.parameter.dtype), x.copies), {})[name] = x
    storages = list[Storage]()
    for (axes, _, copies), members in sorted(groups.items(), key=lambda item: item[0]):
        across = mesh.line("edp") if hybrid and axes.startswith("dp") else None
        line, first = mesh.line(axes.replace("dp", "ep", 1) if across else axes), next(iter(members.values())).parameter
        # tied parameters of two stages stay whole, because stages do not wait for each other inside a pass
        stage = min(zero, 1) if _ENDS in axes else zero
        units = _units(members, model, stage, bucket_bytes)
        modules = [{unit_of(model, x) for x in stored.modules} for stored in members.values()]
        users = (
            len(set[str]().union(*(x for x, n in zip(modules, units) if n == unit))) for unit in dict.fromkeys(units)
        )
        words, dtype = tuple(x.parameter.numel() for x in members.values()), flat_array(first.data.new_empty(0)).dtype
        # the sizes of whole parameters are the same on all ranks along tp, and so are the owners
        owners = owners_of([x.shape.numel() for x in members.values()], line.size) if whole and stage else ()
        shared = line.size, stage, np.dtype(dtype), across.size if across else 1, owners
        layout = FlatShards(tuple(members), words, units, tuple(users), *shared)
        of_torch = {name: x.parameter for name, x in members.items()}
        storages.append(Storage(line, layout, of_torch, copies, across))
    return storages


def _units(members: Parameters, model: nn.Module, stage: int, bucket_bytes: int) -> tuple[int, ...]:
    """Return the bucket of each parameter: buckets of up to `bucket_bytes`; with stage 3 one for each unit."""
    units, number, size, last = list[int](), 0, 0, None
    for name, x in members.items():
        unit: Any = unit_of(model, name.rpartition(".")[0]) if stage == 3 else x.chunks[0]
        nbytes = x.parameter.numel() * x.parameter.itemsize
        if units and (unit != last or (stage < 3 and size and size + nbytes > bucket_bytes)):
            number, size = number + 1, 0
        units.append(number)
        size, last = size + nbytes, unit
    return tuple(units)


def unit_of(model: nn.Module, module: str) -> str:
    """Return the module whose parameters become whole together with those of `module`, before its forward pass.

    A block of a list, or else the largest module without lists, which may use parameters of its modules by itself.
    """
    names = module.split(".")
    for at in range(1, len(names) + 1):
        unit = ".".join(names[:at])
        within, parent = model.get_submodule(unit), model.get_submodule(".".join(names[: at - 1]))
        if type(within).forward is nn.Module.forward:  # a container, which is not called
            continue
        if (at > 1 and isinstance(parent, _LISTS)) or not any(isinstance(x, _LISTS) for x in within.modules()):
            return unit
    return module
