#!/usr/bin/env python3
"""Print the packages of a run on a GPU that are missing or too old here, one a line.   argument : pyproject.toml."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # pip contains a copy
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

TESTS = ("pytest", "pytest-mpi", "pytest-timeout", "hypothesis")


def missing(requirements: Sequence[str]) -> Iterator[str]:
    """Yield the requirements that no installed package meets, without their markers."""
    for wanted in map(Requirement, requirements):
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            met = wanted.specifier.contains(version(wanted.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            yield f"{wanted.name}{wanted.specifier}"


if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    print(*missing([*project["dependencies"], *TESTS]), sep="\n", end="")
