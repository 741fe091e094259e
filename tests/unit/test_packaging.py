"""Packages for pip: the contents of wheel and sdist, and the modules that `import pdgemm` loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIST_INFO = f"pdgemm-{PROJECT['version']}.dist-info"

pytest.importorskip("build")  # an environment with only the `test` extra


def python(*args: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Return the output of `python ARGS` in cwd, with `path` first on Python's path; on failure, show all output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    run = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or sdist without network, by the setuptools of this environment; return its path."""
    python("-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, source, cwd=out.parent)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def source(tmp: Path) -> Path:
    """A copy of the checkout without files of earlier builds, and without tests."""
    copy = tmp / "source"
    leave = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "*.h5", "demo-data", "tests")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=leave)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp: Path) -> Path:
    return build("wheel", source, tmp / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp: Path) -> Path:
    """A folder that contains only the installed wheel."""
    target = tmp / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
    python(*pip, target, wheel, cwd=tmp)
    return target


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as z:
        return {name: z.read(name) for name in z.namelist()}


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    files = contents(wheel)
    own = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pdgemm").rglob("*.py")}
    own = {name for name in own if not name.startswith(("pdgemm/grids/", "pdgemm/io/"))}  # without links
    linked = {f"pdgemm/{p.relative_to(ROOT)}" for folder in ("grids", "io") for p in (ROOT / folder).rglob("*.py")}
    assert {n for n in files if n.endswith(".py")} == own | linked
    assert {"pdgemm/__init__.py", "pdgemm/grids/process_grid.py", "pdgemm/io/hdf5.py"} <= files.keys()
    pages = {f"pdgemm/tools/studies/{x}" for x in ("parts.html", "report.html", "run.html", "report.mplstyle")}
    pages |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "pdgemm/planning/published").glob("*.csv")}
    assert {"pdgemm/py.typed", *pages, f"{DIST_INFO}/licenses/LICENSE"} <= files.keys()
    assert {n.split("/")[0] for n in files} == {"pdgemm", DIST_INFO}
    metadata = files[f"{DIST_INFO}/METADATA"].decode()
    wanted = ["License-Expression: Apache-2.0", f"Requires-Python: {PROJECT['requires-python']}"]
    wanted += [f"Provides-Extra: {extra}" for extra in PROJECT["optional-dependencies"]]
    assert all(line in metadata.splitlines() for line in wanted)
    assert "pdgemm = pdgemm.tools.cli.commands:main" in files[f"{DIST_INFO}/entry_points.txt"].decode()


def test_wheel_from_sdist_is_the_same(wheel: Path, source: Path, tmp: Path) -> None:
    with tarfile.open(build("sdist", source, tmp / "sdist")) as tar:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        tar.extractall(tmp / "unpacked", **safely)
    (unpacked,) = (tmp / "unpacked").iterdir()
    again, first = contents(build("wheel", unpacked, tmp / "wheel-from-sdist")), contents(wheel)
    del again[f"{DIST_INFO}/RECORD"], first[f"{DIST_INFO}/RECORD"]  # RECORD lists the files in any order
    assert again.keys() == first.keys()
    assert [n for n in first if again[n] != first[n]] == []


def test_installed_wheel_imports_and_is_light(installed: Path, tmp: Path) -> None:
    code = """
import io, sys, pdgemm
print(pdgemm.__version__, *{m.split('.')[0] for m in sys.modules})
import pdgemm.grids, pdgemm.io.hdf5 as h
print(pdgemm.__file__, h.__file__, io.__file__, sep="\\n")
"""
    said = python("-c", code, cwd=tmp, path=installed).splitlines()
    version, *loaded = said[0].split()
    assert version == PROJECT["version"] and "pdgemm" in loaded
    assert {*loaded} & {"cupy", "h5py", "jinja2", "matplotlib", "mpi4py"} == set()
    package, hdf5, stdlib_io = map(Path, said[1:])
    assert (package, hdf5) == (installed / "pdgemm" / "__init__.py", installed / "pdgemm" / "io" / "hdf5.py")
    assert installed not in stdlib_io.parents


def test_links_in_the_checkout(source: Path) -> None:
    for name in ("grids", "io"):
        assert (source / "pdgemm" / name).readlink() == Path("..") / name
    # With this file, a program in the checkout could not import the standard library's io.
    assert not (source / "io" / "__init__.py").exists()
