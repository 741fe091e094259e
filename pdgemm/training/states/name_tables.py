"""Tables of names: which tensors of a file of another program are which parameters of a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from pdgemm.errors import ArgumentError
from pdgemm.matrix.distmatrix import DistMatrix

OPTIMIZER = "optimizer/"  # before the names of what an optimizer keeps: "optimizer/exp_avg/NAME"
_SHOWN = 9  # tensors in each list of a message


@dataclass(frozen=True)
class Named:
    """The tensors of a file that are a parameter of a module, or several parameters one after the other.

    ::

        Named("h.*.attn.c_attn.weight", transposed=True)                             # a Conv1D of GPT-2
        Named(("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"), shares=(4, 1, 1))

    names  : in the file; the tensors follow one another along `dim`.
    transposed : the file has the transposed matrices.
    shares : the sizes of the tensors along `dim`, up to a common factor; by default they are equal.
    view, axes : the order along `dim`: the indices of the file, in the shape `view` and then with the axes in the order
        of `axes`, are those of the parameters.  One number of `view` may be -1.  Where the file has the halves of
        rotary features, and the module has pairs of neighbours: view=(heads, 2, -1), axes=(0, 2, 1).  Where the file
        has [query | key | value] of one head after the other: view=(heads, 3, -1), axes=(1, 0, 2).
    dim    : a dimension of the parameters.
    """

    names: str | tuple[str, ...]
    transposed: bool = False
    shares: tuple[int, ...] = ()
    view: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    dim: int = 0

    def parameters(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return the parameters, of these sizes along `dim`, from the tensors of the file."""
        x = _joined([x.mT if self.transposed else x for x in tensors], self.dim)
        return _divided(self._reordered(x, self.view, self.axes), sizes, self.dim)

    def tensors(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors of the file from the parameters.  Raises ArgumentError where their shapes do not fit."""
        shares = self.shares or (1,) * len(as_names(self.names))
        try:
            x = _joined(parameters, self.dim)
            x = self._reordered(x, [self.view[at] for at in self.axes], np.argsort(self.axes).tolist())
            part = x.shape[self.dim] // sum(shares) if x.dim() else 0
            return [x.mT if self.transposed else x for x in _divided(x, [part * n for n in shares], self.dim)]
        except (RuntimeError, IndexError) as bad:
            shapes = " and ".join(str(tuple(x.shape)) for x in parameters)
            raise ArgumentError(f"parameters of shapes {shapes} cannot be stored as {self}: {bad}") from None

    def _reordered(self, x: torch.Tensor, view: Sequence[int], axes: Sequence[int]) -> torch.Tensor:
        """Return x with another order along `dim`."""
        if not view:
            return x
        rows = x.movedim(self.dim, 0)
        rest = range(len(view), len(view) + x.dim() - 1)
        return rows.reshape(*view, *rows.shape[1:]).permute(*axes, *rest).reshape(rows.shape).movedim(0, self.dim)


Names = Mapping[str | tuple[str, ...], str | Named | None]


class Match(NamedTuple):
    """Parameters of a module, tensors of a file, and how these are stored there."""

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    how: Named

    def stored(self, tensor_of: Callable[[str], torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of the file, by name, from those of the parameters.  Raises ArgumentError."""
        return zip(self.tensors, self.how.tensors([tensor_of(name) for name in self.parameters]))


def as_names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def matches(
    names: Names | None, known: Collection[str], called: Mapping[str, str], there: Iterable[str] = ()
) -> tuple[list[Match], list[str]]:
    """Return the matches of all parameters, and the patterns of names that have no partner.

    names : patterns of parameters, in which each "*" is any text, and the names in the file, in which the same text
        takes the place of "*".  Several parameters are a tuple of patterns, of which the first one is matched.  The
        first pattern that matches a parameter counts.  None: parameters, or tensors of the file, without a partner.
        None in place of a table: equal names, of a file that may have a parameter by any of its names in the model.
    known : the parameters of the model.   called : the known names of parameters, by all their names.
    there : the names in the file.
    Raises ArgumentError with the parameters that no pattern matches, or where no parameter matches a pattern.
    """
    if names is None:
        stored = {called.get(name, name): name for name in there}
        kept = (name for name in there if name.startswith(OPTIMIZER) and parameter_of(name) in known)
        return [Match((name,), (stored.get(name, name),), Named(name)) for name in (*known, *kept)], [*called]
    pairs, left, ignored = list[Match](), dict.fromkeys(known), list[str]()
    for key, value in names.items():
        patterns, how = as_names(key), Named(value) if isinstance(value, str) else value
        compiled = re.compile("(.+)".join(map(re.escape, patterns[0].split("*"))))
        matched = [match.groups() for name in left if (match := compiled.fullmatch(name))]
        if how and not matched:
            raise ArgumentError(f"no parameter matches {key!r} of the table of names; they are {', '.join(known)}")
        for texts in matched:
            own, there = (tuple(_filled(x, texts) for x in xs) for xs in (patterns, as_names(how.names) if how else ()))
            if unknown := [name for name in own if name not in left]:
                raise ArgumentError(f"{unknown[0]!r} is not a parameter that is left for {key!r} in the table of names")
            for name in own:
                del left[name]
            pairs += [Match(own, there, how)] if how else []
        ignored += [] if how else patterns
    if left:
        raise ArgumentError(
            f"the table of names has no pattern for {', '.join(left)}: None for those without a partner"
        )
    return pairs, ignored


def parameter_of(name: str) -> str:
    """Return the parameter that a tensor of the optimizer belongs to, or the name itself."""
    return name.split("/", 2)[-1] if name.startswith(OPTIMIZER) else name


def kind_of(name: str, shape: Sequence[int]) -> str:
    """Return what the optimizer keeps in a tensor, and the shape of the parameter; "" for other tensors."""
    return f"{name.split('/')[1]} of {[*shape]}" if name.startswith(OPTIMIZER) else ""


class FileTensor(NamedTuple):
    """A tensor of a file.   matrix : its elements, divided among the ranks.   shape : None where the file has none."""

    matrix: DistMatrix
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.shape or self.matrix.shape} {self.matrix.dtype}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter of this shape can have these elements."""
        is_real, same = self.matrix.dtype.kind != "c", self.shape in (None, shape)
        return is_real and same and self.matrix.shape == table_shape(shape)


def table_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the matrix of a tensor: vectors are columns, and dimensions behind the first are one."""
    return (*shape, 1)[0], prod(shape[1:])


def check_tensors(
    source: Any,
    there: Mapping[str, FileTensor],
    pairs: Iterable[Match],
    empty: Callable[[str], torch.Tensor],
    ignored: Iterable[str],
) -> None:
    """Raise ArgumentError with all tensors that a file lacks, or that are of no use or of another shape.

    empty : returns a tensor of the shape of a parameter.   ignored : patterns of names that are of no use.
    """
    lists: dict[str, list[str]] = {"without": [], "with other": [], "with more": []}
    wanted = [x for match in pairs for x in match.stored(empty)]
    for name, x in wanted:
        if name not in there:
            lists["without"].append(f"{name} {tuple(x.shape)}")
        elif not there[name].fits(x.shape):
            lists["with other"].append(f"{name} {there[name]} in place of {tuple(x.shape)}")
    for name in sorted(there.keys() - {name for name, _ in wanted}):
        if not any(fnmatchcase(name, pattern) for pattern in ignored):
            lists["with more"].append(f"{name} {there[name]}")
    for texts in lists.values():
        texts[_SHOWN:] = [f"{len(texts) - _SHOWN} others"] if len(texts) > _SHOWN else []
    if wrong := [f"{what} {', '.join(texts)}" for what, texts in lists.items() if texts]:
        raise ArgumentError(f"{source} is not of this model: {'; '.join(wrong)}")


def _filled(pattern: str, texts: Sequence[str]) -> str:
    """Return a pattern with a text in place of each "*".  Raises ArgumentError where there is another number."""
    if pattern.count("*") != len(texts):
        raise ArgumentError(f"{pattern!r} of the table of names needs a * for each of {', '.join(texts) or 'no texts'}")
    return "".join(part + text for part, text in zip(pattern.split("*"), (*texts, "")))


def _joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat([*tensors], dim) if len(tensors) > 1 else tensors[0]


def _divided(x: torch.Tensor, sizes: Sequence[int], dim: int) -> Sequence[torch.Tensor]:
    return x.split([*sizes], dim) if len(sizes) > 1 else [x]
