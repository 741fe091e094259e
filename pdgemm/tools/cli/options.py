"""Types of command-line arguments (datasets, shapes, sizes, numbers), and the options that several commands have."""

from __future__ import annotations

import cmath
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click

from pdgemm.local.arrays import dtypes
from pdgemm.planning import algorithm_registry
from pdgemm.schedules import mover_registry
from pdgemm.support.files import is_npy
from pdgemm.support.json_input import LARGEST
from pdgemm.support.text import echo

_SHOWN = 100  # characters of an invalid argument that a message shows


class Dataset(NamedTuple):
    """A dataset in a file.  The name of the only array in a .npy file is ""."""

    path: str
    name: str

    def __str__(self) -> str:
        return ":".join(self)

    def member(self, name: str) -> Dataset:
        """Return the dataset `name` in the group `self`."""
        return Dataset(self.path, f"{self.name}/{name}")


class _Form(click.ParamType[Any]):
    """A click type that parses by a function, and names an example of its form in errors."""

    def __init__(self, name: str, parse: Callable[[str], Any], example: str) -> None:
        self.name, self._parse, self._example = name, parse, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except OverflowError:
            self.fail(f"{value[:_SHOWN]!r} is too large", param, ctx)
        except (ValueError, ArithmeticError):
            self.fail(f"{value[:_SHOWN]!r} is not of the form {self._example}", param, ctx)


def _dataset(text: str) -> Dataset:
    path, colon, name = text.rpartition(":")
    if not path or not colon or not name.strip("/"):
        raise ValueError
    return Dataset(path, name)


def _matrix(text: str) -> Dataset:
    return Dataset(text, "") if is_npy(text) else _dataset(text)


def _bounded(number: int) -> int:
    if abs(number) > LARGEST:
        raise OverflowError
    return number


def _integers(text: str, separators: str = ",", count: int | None = None) -> tuple[int, ...]:
    numbers = tuple(_bounded(int(x)) for x in re.split(f"[{separators}]", text, flags=re.IGNORECASE))
    if len(numbers) != (count or len(numbers)):
        raise ValueError
    return numbers


def _block(text: str) -> tuple[int, ...]:
    return _PAIR(text) if re.search("[xX,]", text) else _integers(text, count=1) * 2


def _quantity(text: str, units: dict[str, float]) -> float:
    """Return the number in a text such as "10min", times the factor of its unit; the unit "" is for bare numbers."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in units:
        raise ValueError
    number = float(match[1]) * units[match[2]]
    _bounded(int(number))
    return number


def _bytes(text: str) -> int:
    return int(_quantity(text, _OF_BYTES))


def _count(text: str) -> int:
    """Return a whole number, which may be written as 25e6."""
    number = float(text)
    if not number.is_integer() or number < 0:
        raise ValueError
    return _bounded(int(number))


def _number(text: str) -> complex:
    try:
        value: complex = float(text)
    except ValueError:
        value = complex(re.sub("i$", "j", text))
    if not cmath.isfinite(value) and not re.search("inf|nan", text, re.IGNORECASE):
        raise OverflowError
    return value


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_OF_BYTES = {
    f"{prefix}{binary}{b}": (1024.0 if binary else 1000.0) ** power
    for power, prefix in enumerate(("", "k", "m", "g", "t")) for binary in ("", "i") for b in ("", "b")
}  # fmt: skip
_PAIR = partial(_integers, separators="x,", count=2)
DATASET = _Form("file:/dataset", _dataset, "FILE:/DATASET, such as a.h5:/x")
MATRIX = _Form("file:/dataset or file.npy", _matrix, "FILE:/DATASET or FILE.npy, such as a.h5:/x")
SHAPE = _Form("rows x cols", _PAIR, "ROWSxCOLS, such as 5000x3000")
MNK = _Form("m,n,k", partial(_integers, separators="x,", count=3), "M,N,K, such as 16384,16384,16384")
GRID = _Form("PrxPc", _PAIR, "2x3")
BLOCK = _Form("size", _block, "256 or 256x128")
SUBSET = _Form("lo:hi", partial(_integers, separators=":", count=2), "0:9, the first and the last index")
INTEGERS = _Form("numbers", _integers, "1,2,4")
BYTES = _Form("bytes", _bytes, "2GiB, 500MB or 1000000")
WORDS = _Form("number", _count, "25e6 or 25000000")
SECONDS = _Form("time", partial(_quantity, units=_SECONDS), "10min, 90s, 2h or 3d, with its unit")
NUMBER = _Form("number", _number, "1.5 or 2+1j")

MOST = 1 << 31
COUNT = click.IntRange(1, MOST)  # number of ranks, layers, inner indices, repetitions
DTYPES = tuple(x.name for x in dtypes.OPERANDS if x in dtypes.STORED)
OPERANDS = tuple(x.name for x in dtypes.OPERANDS)
BLAS_DTYPES = tuple(x.name for x in dtypes.BLAS)
SUMS = tuple(x.name for x in dtypes.SUMS)


def stacked_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return several options as one decorator, in the order of the help text."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def typed(parameters: Iterable[str]) -> list[str]:
    """Return the options of these parameters that the user typed for the running command."""
    context, names = click.get_current_context(), {*parameters}
    on_command_line = click.core.ParameterSource.COMMANDLINE
    return [
        x.opts[0] for x in context.command.params
        if x.name in names and context.get_parameter_source(x.name) is on_command_line
    ]  # fmt: skip


def check_apart(others: dict[str, str | None], datasets: Iterable[Any]) -> None:
    """Raise UsageError if a file in `others` is also the file of a dataset, or if two options name the same file.

    datasets : the datasets of the command.   others : its other files, by the options that name them.
    """
    used = {os.path.realpath(x.path) for x in datasets if x}
    for name, path in ((name, os.path.realpath(file)) for name, file in others.items() if file):
        if path in used:
            raise click.UsageError(f"{name} {others[name]} is a file that is read or written here: name another one")
        used.add(path)


def picture(help: str) -> Callable[[Any], Any]:
    """Return the option --plot of a command.   help : the contents of the picture."""
    return click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), help=help)


def pictures_for(picture: Path | None, force: bool, of_runs: bool = False) -> Any:
    """Return the module that draws pictures; None without a picture.  Raises an error if `picture` cannot be written.

    of_runs : the picture may be an HTML page, too.
    """
    if picture is None:
        return None
    from pdgemm.tools.studies import figures, pictures

    figures.check_output(picture, figures.FORMS if of_runs else figures.IMAGES, force)
    return pictures


def check(tables: str, help: str) -> Callable[[Any], Any]:
    """Return the option --check, which needs no other option.   tables : the function whose tables it prints."""
    module, _, function = tables.rpartition(".")

    def show_tables(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            echo("\n\n".join(map(str, getattr(import_module(module), function)())))
            context.exit()

    return click.option("--check", is_flag=True, is_eager=True, expose_value=False, callback=show_tables, help=help)


def show(as_json: bool, facts: dict[str, Any], text: str, picture: Path | None = None) -> int:
    """Print the facts as a JSON object, or the text, with the name of the picture that was written; return 0."""
    if as_json:
        echo(json.dumps(facts | ({"wrote": str(picture)} if picture else {})))
    else:
        echo(f"{text}\nwrote {picture}" if picture else text)
    return 0


compression = click.option(
    "--compression", type=click.Choice(("gzip", "lzf")), help="Compress the dataset that is written, in chunks."
)
force = click.option("--force", is_flag=True, help="Replace any file or dataset, also one that pdgemm did not write.")
layout = stacked_options(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as possible."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
)
seed = click.option("--seed", default=0, show_default=True)
verified = click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored.")
memory_limit = click.option("--memory-limit", type=BYTES, help="Memory limit per rank for buffers, besides A, B and C.")
json_ = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
debug = click.option("--debug", is_flag=True, expose_value=False, help="Print tracebacks of errors.")
device = click.option("--device", type=click.Choice(("host", "cuda")), default="host", show_default=True)
mover = click.option("--mover", type=click.Choice(mover_registry.mover_choices()), default="auto", show_default=True)
machine = click.option(
    "--machine", "machine_file", help="A name (`pdgemm info` lists them), or a file of `pdgemm calibrate`."
)
trace = stacked_options(
    click.option("--trace", "trace_file", type=click.Path(dir_okay=False), help="Timeline for `pdgemm profile`."),
    click.option("--nvtx", is_flag=True, help="Mark NVTX ranges, for Nsight Systems."),
)
algorithm = stacked_options(
    click.option(
        "--algorithm", type=click.Choice(algorithm_registry.algorithm_choices()), default="auto", show_default=True
    ),
    click.option(
        "--product-grid", "shape", type=GRID, help="Grid of the product, which need not be that of the matrices."
    ),
    click.option("--layers", type=COUNT, help="Layers of that grid (2.5d)."),
)
