"""Types of command-line arguments: datasets, shapes, sizes, numbers."""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import click

from pdgemm.support.files import is_npy
from pdgemm.support.json_input import LARGEST

_SHOWN = 100  # characters of an invalid argument that a message shows


class Dataset(NamedTuple):
    """A dataset in a file; a .npy file has one, of the name ""."""

    path: str
    name: str


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


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*(?:([KMGT]?)(i?)B?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError
    number, unit, binary = match.groups()
    return _bounded(int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")))


def _bytes_with_unit(text: str) -> int:
    if not re.search("[a-z]", text, re.IGNORECASE):
        raise ValueError
    return _bytes(text)


def _count(text: str) -> int:
    """Return a whole number, which may be written as 25e6."""
    number = float(text)
    if not number.is_integer() or number < 0:
        raise ValueError
    return _bounded(int(number))


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([\d.]+)\s*(s|min|h|d)\s*", text)
    if match is None:
        raise ValueError
    number, unit = match.groups()
    _bounded(int(float(number)))
    return float(number) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]


def _number(text: str) -> complex:
    above, fraction, below = text.partition("/")
    value = _part(above) / (_part(below) if fraction else 1)
    if not cmath.isfinite(value) and not re.search("inf|nan", text, re.IGNORECASE):
        raise OverflowError
    return value


def _part(text: str) -> complex:
    try:
        return float(text)
    except ValueError:
        return complex(re.sub("i$", "j", text))


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
MEMORY = _Form("bytes", _bytes_with_unit, "80GB or 40GiB, with its unit")
WORDS = _Form("number", _count, "25e6 or 25000000")
SECONDS = _Form("time", _seconds, "10min, 90s, 2h or 3d, with its unit")
NUMBER = _Form("number", _number, "1.5, 1/3 or 2+1j")
