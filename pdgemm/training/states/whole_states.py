"""States of a run: whole parameters, buffers and what the optimizer keeps, in files and in mappings of torch.

A file has whole tensors by the names of the model, "optimizer/exp_avg/NAME" for what the optimizer keeps, and one text:
the number of steps, the options of the optimizer, shapes of what it keeps that are not those of parameters, and the
position of the sampler.  It does not depend on the mesh.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pdgemm.errors import ArgumentError
from pdgemm.io import hdf5
from pdgemm.io.atomic import on_root
from pdgemm.io.safetensors import matrices as safetensors
from pdgemm.io.safetensors.matrices import read_header
from pdgemm.local.arrays.dtypes import STORED
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.support.agreement import together
from pdgemm.support.watchdog import ending_the_job
from pdgemm.training.layers.context import flat_array
from pdgemm.training.layers.placements import Division
from pdgemm.training.parameters import Parameters
from pdgemm.training.stages import Chain
from pdgemm.training.states import name_tables
from pdgemm.training.states.name_tables import FileTensor, Names, check_tensors, matches, parameter_of, table_shape
from pdgemm.training.storage import WIDE, Storage
from pdgemm.training.updates import Updates

if TYPE_CHECKING:
    from pdgemm.parallel.sampler import Sampler

_HDF5, _SAFETENSORS, _INDEX = ".h5", ".safetensors", ".safetensors.index.json"
_RUN = "pdgemm.training"  # the name of the text
Optimizers = list[torch.optim.Optimizer]


class Owned(NamedTuple):
    """What a rank has of a tensor: some elements of its part.

    place : of the part along the axis of the division.   shape : of the part.   start, stop : of the elements.
    """

    division: Division
    dtype: torch.dtype
    place: int
    shape: torch.Size
    start: int
    stop: int


class WholeTensors:
    """The tensors of a run, by name: parameters and buffers as in the model, and "optimizer/exp_avg/NAME".  Collective.

    owned : what each rank has of each, by rank.   types : of parameters and buffers in the model, by all their names.
    names : the parameter that a name of the model means, where modules share parameters.
    numbers : for each group of the optimizer, what it keeps once for a parameter, such as the number of its steps: by
        name, and under "" those of all other parameters.
    shapes : in a file that is loaded, by `name_tables.kind_of`, of what the optimizer keeps in other shapes than those
        of parameters.
    """

    def __init__(self, run: RunStates, optimizers: Optimizers, shapes: Mapping[str, Sequence[int]]) -> None:
        self._run, self._line, in_model = run, run.mesh.line("pp+dp+cp+tp"), run.model.state_dict()
        first = {id(x): name for name, x in run.model.named_parameters()}
        self.names = {name: first[id(x)] for name, x in run.model.named_parameters(remove_duplicate=False)}
        self.types = {name: x.dtype for name, x in in_model.items()}
        self._buffers = {name: x for name, x in in_model.items() if name not in self.names}
        self._own, self._elements, self._shapes = dict[str, Owned](), dict[str, torch.Tensor](), shapes
        with together(run.mesh.comm):
            self._add_model()
            numbers = self._add_kept(optimizers)
        everywhere = run.mesh.comm.allgather((self._own, numbers))
        self.numbers = list[dict[str, Any]]()
        for ranks in zip(*(x for _, x in everywhere)):
            of_names = {name: x for own in ranks for name, x in own.items()}
            most: dict[str, Any] = next(iter(of_names.values()), {})
            self.numbers.append({"": most} | {name: x for name, x in of_names.items() if x != most})
        names = [*(self.names.get(name, name) for name in in_model), *(name for own, _ in everywhere for name in own)]
        self.owned = {
            name: {rank: own[name] for rank, (own, _) in enumerate(everywhere) if name in own}
            for name in dict.fromkeys(names)
        }

    def _add_model(self) -> None:
        """Add what this rank has of parameters and buffers."""
        run, pieces = self._run, {piece.name: piece for piece in self._run.updates.parts}
        at_owners = self._run.updates.whole_names
        for name, stored in run.parameters.items():
            x, place = stored.parameter, run.mesh.index(stored.division.axis) if stored.division.axis else 0
            span, dtype = slice(0, 0), WIDE.get(x.dtype, torch.float32)
            if name in pieces:
                span, self._elements[name] = pieces[name].span, pieces[name].weights.detach().view(-1)
            elif name in run.frozen:
                span, dtype, self._elements[name] = slice(0, x.numel()), x.dtype, x.data.view(-1)
            self._own[name] = Owned(stored.division, dtype, place, x.shape, span.start, span.stop)
            if name in at_owners:
                self._own[name] = Owned(Division(), dtype, 0, stored.shape, span.start, span.stop)
        for name, x in self._buffers.items():
            if not run.chain or run.chain.is_own(name.rpartition(".")[0]):
                self._elements[name] = x.reshape(-1)
                self._own[name] = _all_of(x)

    def _add_kept(self, optimizers: Optimizers) -> list[dict[str, Any]]:
        """Add what optimizers keep on this rank, and return the numbers that they keep, by group and parameter."""
        numbers, names = list[dict[str, Any]](), {id(piece.weights): piece.name for piece in self._run.updates.parts}
        for optimizer, group in _groups(optimizers):
            numbers.append({})
            for weights in group["params"]:
                for key, x in optimizer.state.get(weights, {}).items():
                    tensor, name = isinstance(x, torch.Tensor), names[id(weights)]
                    if tensor and x.dim() and weights.shape in (x.shape, self._run.parameters[name].shape):
                        self._add(f"{name_tables.OPTIMIZER}{key}/{name}", x, weights)
                    elif (tensor and not x.dim()) or isinstance(x, (int, float)):
                        numbers[-1].setdefault(name, {})[key] = [x.item()] if tensor else x
                    elif x is not None:
                        what = f"{key!r} of {type(optimizer).__name__} is {getattr(x, 'shape', x)!r:.60}"
                        raise ArgumentError(f"{what}: states have numbers and tensors, of parts only of their shapes")
        return numbers

    def _add(self, name: str, x: torch.Tensor, weights: nn.Parameter) -> None:
        """Add a tensor that the optimizer keeps for weights: one like them, or one for a whole parameter."""
        like = self._own[parameter_of(name)]._replace(dtype=x.dtype)
        self._elements[name], self._own[name] = x.view(-1), like if x.shape == weights.shape else _all_of(x)

    def restart(self, optimizers: Optimizers, kept: Iterable[str], numbers: list[dict[str, Any]]) -> None:
        """Let the optimizers keep zeros in these tensors, and these numbers.  Local."""
        pieces = {piece.name: piece.weights for piece in self._run.updates.parts}
        of_weights = dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]]()
        for number, (optimizer, group) in zip(numbers, _groups(optimizers)):
            optimizer.state.clear()
            of_weights |= {id(x): (optimizer, number) for x in group["params"]}
        for name in kept:
            if (weights := pieces.get(parameter_of(name))) is not None:
                optimizer, number = of_weights[id(weights)]
                state = optimizer.state[weights]
                for key, x in number.get(parameter_of(name), number[""]).items() if not state else ():
                    state[key] = torch.tensor(x[0]) if isinstance(x, list) else x
                kind = name_tables.kind_of(name, self._run.parameters[parameter_of(name)].shape)
                state[name.split("/")[1]] = zeros = weights.new_zeros(self._shapes.get(kind, weights.shape))
                self._add(name, zeros, weights)

    def _parts(self, name: str, device: str) -> dict[int, torch.Tensor]:
        """Return new tensors for the parts of a tensor, by place."""
        of_ranks = self.owned.get(name, self.owned[parameter_of(name)]).values()
        dtype, shapes = next(iter(of_ranks)).dtype, sorted({x.place: x.shape for x in of_ranks}.items())
        return {place: torch.empty(shape, dtype=dtype, device=device) for place, shape in shapes}

    def empty(self, name: str) -> torch.Tensor:
        """Return a tensor without elements, of the shape of a tensor of the run or of its optimizer."""
        division = next(iter(self.owned.get(name, self.owned[parameter_of(name)]).values())).division
        x = division.joined([*self._parts(name, "meta").values()])
        return x.new_empty(self._shapes.get(name_tables.kind_of(name, x.shape), x.shape))

    def gathered(self, name: str, root: int) -> torch.Tensor:
        """Return a tensor on rank `root`, and one without elements on others.  Collective."""
        with ending_the_job(self._run.mesh.comm):
            lowest = {(x.place, x.start): rank for rank, x in reversed(self.owned[name].items()) if x.start < x.stop}
            owners = {rank: self.owned[name][rank] for rank in lowest.values()}
            ranks = (*range(root, self._line.size), *range(root))
            counts = tuple(owners[x].stop - owners[x].start if x in owners else 0 for x in ranks)
            parts, starts = self._parts(name, "cpu"), dict(zip(ranks, accumulate((0, *counts))))
            flat = torch.empty(sum(counts), dtype=parts[min(parts)].dtype)
            pieces = {rank: flat[starts[rank] :][: x.stop - x.start] for rank, x in owners.items()}
            if self._line.rank in pieces:
                pieces[self._line.rank].copy_(self._elements[name])
            array = flat_array(flat)
            self._line.carry_out(Collective("gather", "flat", ranks, counts, array.dtype), array, "states")
            if self._line.rank != root:
                return self.empty(name)
            for rank, x in owners.items():
                parts[x.place].view(-1)[x.start : x.stop] = pieces[rank]
            return self.owned[name][min(self.owned[name])].division.joined([*parts.values()])

    def set(self, name: str, whole: torch.Tensor) -> None:
        """Set this rank's elements of a tensor.  Local."""
        if name in self._buffers:
            self._buffers[name].copy_(whole)
        elif name in self._elements:
            own = self._own[name]
            ranks = self._run.mesh.length(own.division.axis) if own.division.axis else 1
            part = own.division.part(whole, ranks, own.place).reshape(-1)
            self._elements[name].copy_(part[own.start : own.stop])


class RunStates:
    """The states of a run: what `Run` has in addition to its steps."""

    model: nn.Module
    mesh: Mesh
    parameters: Parameters
    storages: list[Storage]
    updates: Updates
    frozen: list[str]
    chain: Chain | None
    steps: int

    def save(
        self, path: str | Path, *, sampler: Sampler | None = None, extra: Any = None, names: Names | None = None
    ) -> None:
        """Write the state of the run to a file, from which any mesh with any ZeRO stage continues.  Collective.

        ::

            run.save("run.h5", sampler=sampler, extra={"scheduler": scheduler.state_dict()})
            run.save("model.safetensors", names=TABLE)     # only the parameters, for another program

        path    : ends with .h5 or .safetensors.  The file is complete under its name, or the old file is unchanged,
            also when the job is killed; an old file that pdgemm did not write is not replaced.
        sampler : its position is saved.   extra : anything that JSON can express; that of rank 0 is saved.
        names   : a table of names, see `pdgemm.training.states.name_tables.matches`.  Only parameters and buffers are
            written, in their types in the model.

        The file has whole parameters, master weights where parameters have 16 bits, by their names in the model; what
        the optimizer keeps of them; and the number of steps and the options of the optimizer.  In HDF5, vectors are
        columns, and dimensions behind the first one are one dimension.

        Cost: each rank sends its elements once, which `mesh.traffic["states"]` counts, and holds 1/P of the file.
        Raises ArgumentError or FileError on all ranks.
        """
        comm, optimizers = self.mesh.comm, self.updates.optimizers if names is None else []
        with together(comm) as arguments:
            arguments += ["Run.save", path := _checked(path, _HDF5, _SAFETENSORS), str(names)]
            options = [{key: x for key, x in group.items() if key != "params"} for _, group in _groups(optimizers)]
            state = {"steps": self.steps, "rule": _name(optimizers), "options": options, "extra": extra}
            state["loss_scale"] = self.updates.scale and vars(self.updates.scale)
            state["sampler"] = sampler and sampler.state(self.steps)
            json.dumps(state)
        tensors = WholeTensors(self, optimizers, {})
        with together(comm):
            pairs, _ = matches(names, tensors.owned, tensors.names)
            written = Counter(name for match in pairs for name, _ in match.stored(tensors.empty))
            if twice := [name for name, number in written.items() if number > 1]:
                raise ArgumentError(f"the table of names stores several parameters as {', '.join(twice)}")
        held, shapes, words = dict[str, DistMatrix](), dict[str, tuple[int, ...]](), [0] * comm.size
        for match in pairs:
            root = words.index(min(words))  # until all are written, each rank has about as many elements
            for name, x in match.stored(partial(tensors.gathered, root=root)):
                shapes[name], words[root] = tuple(x.shape), words[root] + x.numel()
                x = x if names is None else x.to(tensors.types[match.parameters[0]])
                held[name] = _matrix(x, root, self.mesh, path.suffix == _HDF5)
        others = [x for x in shapes if names is None and shapes[x] != shapes[parameter_of(x)]]
        kinds = {name_tables.kind_of(x, shapes[parameter_of(x)]): shapes[x] for x in others}
        state |= {"numbers": tensors.numbers, "shapes": kinds}
        text = {_RUN: comm.bcast(json.dumps(state))} if names is None else {}
        if path.suffix == _HDF5:
            hdf5.save_all(path, held, attrs=text)
        else:
            safetensors.save_all(path, held, shapes=shapes, metadata={"format": "pt"} | text)

    def load(self, path: str | Path, *, sampler: Sampler | None = None, names: Names | None = None) -> Any:
        """Set the run to a file of `save`, and return its `extra`.  Collective.

        path    : ends with .h5, .safetensors or .safetensors.index.json.
        sampler : of the same samples and seed; it continues behind the samples of the saved run, also with another
            batch.   names : a table, as of `save`: only parameters and buffers are read, from a file of any program.

        Call it after `optimizer`.  Without an optimizer only parameters, buffers and the number of steps are set.
        Cost: each rank receives the file once, and holds 1/P of it and one whole parameter.
        Raises ArgumentError on all ranks, before anything is changed, with the tensors that are missing in the file,
        that have no place in the model, or that have another shape; FileError where the file cannot be read.
        """
        optimizers = self.updates.optimizers if names is None else []
        with together(self.mesh.comm) as arguments:
            arguments += ["Run.load", path := _checked(path, _HDF5, _SAFETENSORS, _INDEX), str(names)]
        there, text = _read(path, self.mesh)
        there = {name: x for name, x in there.items() if optimizers or not name.startswith(name_tables.OPTIMIZER)}
        state = json.loads(text or "{}") if names is None else {}
        tensors = WholeTensors(self, [], state.get("shapes", {}))
        with together(self.mesh.comm):
            pairs, ignored = matches(names, tensors.owned, tensors.names, there)
            if names is None:
                _check_state(path, state, optimizers, sampler)
            check_tensors(path, there, pairs, tensors.empty, ignored)
            if optimizers:
                tensors.restart(optimizers, [x for x in there if x.startswith(name_tables.OPTIMIZER)], state["numbers"])
                for (_, group), options in zip(_groups(optimizers), state["options"]):
                    group |= {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
            self.steps = state.get("steps", self.steps)
            if self.updates.scale and (scale := state.get("loss_scale")):
                vars(self.updates.scale).update(scale)
            if sampler and names is None:
                sampler.start = state["sampler"]["taken"] - self.steps * sampler.batch
        self._set(tensors, there, pairs)
        return state.get("extra")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return torch's `state_dict` of the whole module on rank 0, and an empty mapping on others.  Collective."""
        tensors = WholeTensors(self, [], {})
        wholes = {name: tensors.gathered(name, 0) for name in tensors.owned}
        types = {} if self.mesh.rank else tensors.types
        return {name: wholes[tensors.names.get(name, name)].to(dtype) for name, dtype in types.items()}

    def load_state_dict(self, mapping: Mapping[str, torch.Tensor]) -> None:
        """Set parameters and buffers to a `state_dict` of the whole module, that of rank 0.  Collective.

        The state of the optimizer is unchanged.   Raises ArgumentError on all ranks, as `load`.
        """
        tensors, comm = WholeTensors(self, [], {}), self.mesh.comm
        with together(comm):
            own = {} if comm.rank else {name: x.detach() for name, x in mapping.items()}
        own = comm.bcast({name: torch.empty_like(x, device="meta") for name, x in own.items()}) | own
        there = {name: FileTensor(_matrix(x, 0, self.mesh), tuple(x.shape)) for name, x in own.items()}
        with together(comm):
            pairs, ignored = matches(None, tensors.owned, tensors.names, there)
            check_tensors("the mapping", there, pairs, tensors.empty, ignored)
        self._set(tensors, there, pairs)

    @torch.no_grad()
    def _set(self, tensors: WholeTensors, there: Mapping[str, FileTensor], pairs: list[name_tables.Match]) -> None:
        """Set tensors to those of a file.  Collective."""
        with ending_the_job(self.mesh.comm):
            for storage in self.storages:
                storage.complete()
            for match in pairs:
                stored = list[torch.Tensor]()
                for name, x in match.stored(tensors.empty):
                    array = there[name].matrix.allgather()
                    array = array if array.dtype.kind in "fiub" else array.astype(np.float32)  # such as bfloat16
                    stored.append(torch.from_numpy(array).reshape(x.shape))
                shapes = [(*tensors.empty(name).shape, 0) for name in match.parameters]
                for name, x in zip(match.parameters, match.how.parameters(stored, [x[match.how.dim] for x in shapes])):
                    tensors.set(name, x)
            self.updates.updated()
            for storage in self.storages:
                storage.complete()


def _all_of(x: torch.Tensor) -> Owned:
    return Owned(Division(), x.dtype, 0, x.shape, 0, x.numel())


def _checked(path: str | Path, *endings: str) -> Path:
    """Return the path of a state.  Raises ArgumentError where the name has another ending."""
    if not str(path).endswith(endings):
        raise ArgumentError(f"the name of a state ends with {', '.join(endings)}, got {str(path)!r}")
    return Path(path)


def _groups(optimizers: Optimizers) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return the groups of parameters of all optimizers, with these."""
    return [(x, group) for x in optimizers for group in x.param_groups]


def _name(optimizers: Optimizers) -> str:
    return " and ".join(type(x).__name__ for x in optimizers) or "no optimizer"


def _check_state(path: Path, state: Mapping[str, Any], optimizers: Optimizers, sampler: Sampler | None) -> None:
    """Raise ArgumentError where a file has another optimizer or another sampler than the run."""
    there = state.get("rule", _name([])), len(state.get("options", ()))
    if optimizers and (here := (_name(optimizers), len(_groups(optimizers)))) != there:
        differ = f"{there[0]} with {there[1]} groups of parameters, and here it is {here[0]} with {here[1]}"
        raise ArgumentError(f"{path} has {differ}: load parameters without an optimizer before run.optimizer(...)")
    saved = state.get("sampler")
    if sampler and saved != sampler.state(0) | {"taken": saved and saved["taken"]}:
        raise ArgumentError(f"{path} has the sampler {saved}, and here it is {sampler.state(0)}")


def _matrix(x: torch.Tensor, root: int, mesh: Mesh, narrow: bool = False) -> DistMatrix:
    """Return a tensor that rank `root` has as a matrix on all ranks.  Collective.

    narrow : of a type that files of HDF5 can have.
    """
    shape, kind = table_shape(x.shape), flat_array(torch.empty(0, dtype=x.dtype)).dtype
    if narrow and kind not in STORED:
        kind = np.dtype(np.float64 if kind.kind in "biu" else np.float32)
    local = np.empty((shape[0], 0), kind)
    if mesh.rank == root:
        local = flat_array(x.contiguous()).reshape(shape).astype(kind, copy=False)
    block = max(1, shape[0]), max(1, shape[1])
    return DistMatrix.from_local(local, shape, grid=mesh.grid, block=block, source=(0, root))


def _read(path: Path, mesh: Mesh) -> tuple[dict[str, FileTensor], str]:
    """Return the tensors of a file, and the text about its run.  Collective."""
    if path.suffix == _HDF5:
        saved = hdf5.load_all(path, mesh.grid)
        return {name: FileTensor(x, None) for name, x in saved.matrices.items()}, saved.attrs.get(_RUN, "")
    files, there, text = [path.name], dict[str, FileTensor](), ""
    if path.name.endswith(_INDEX):
        files = on_root(mesh.comm, path, lambda: sorted({*json.loads(path.read_text())["weight_map"].values()}))
    for file in map(path.with_name, files):
        header = on_root(mesh.comm, file, partial(read_header, file))
        text = header.metadata.get(_RUN, "")
        loaded = safetensors.load_all(file, mesh.grid)
        there |= {name: FileTensor(x, header.tensors[name].shape) for name, x in loaded.items()}
    return there, text
