"""What a user gets from pip: the contents of wheel and sdist, and what `import pdgemm` loads."""

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

pytest.importorskip("build")  # an environment with the `test` extra only


def python(*args: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The output of python ARGS in cwd, importing from path first; fails with all that it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    run = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds without network: setuptools comes from this environment."""
    python("-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, source, cwd=out.parent)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def modules(folder: str) -> set[str]:
    return {p.relative_to(ROOT / folder).as_posix() for p in (ROOT / folder).rglob("*.py")}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def source(tmp: Path) -> Path:
    """The tree without what earlier builds left in it."""
    copy = tmp / "source"
    leave = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "*.h5", "demo-data")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=leave)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp: Path) -> Path:
    return build("wheel", source, tmp / "wheel")


@pytest.fixture(scope="module")
def sdist(source: Path, tmp: Path) -> Path:
    return build("sdist", source, tmp / "sdist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp: Path) -> Path:
    """A folder with nothing but the installed wheel."""
    target = tmp / "installed"
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    python(*pip, target, wheel, cwd=tmp)
    return target


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as z:
        return {name: z.read(name) for name in z.namelist()}


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(contents(wheel))
    own = {n for n in modules("pdgemm") if not n.startswith(("grids/", "io/"))}
    expected = {f"pdgemm/{n}" for n in own}
    expected |= {f"pdgemm/grids/{n}" for n in modules("grids")} | {f"pdgemm/io/{n}" for n in modules("io")}
    assert {n for n in names if n.endswith(".py")} == expected
    assert {"pdgemm/__init__.py", "pdgemm/grids/process_grid.py", "pdgemm/io/hdf5.py"} <= names
    assert {
        "pdgemm/py.typed",
        "pdgemm/tools/studies/parts.html",
        "pdgemm/tools/studies/report.html",
        "pdgemm/tools/studies/run.html",
        "pdgemm/tools/studies/report.mplstyle",
        f"{DIST_INFO}/licenses/LICENSE",
        f"{DIST_INFO}/entry_points.txt",
    } <= names
    assert {n.split("/")[0] for n in names} == {"pdgemm", DIST_INFO}


def test_metadata(wheel: Path) -> None:
    files = contents(wheel)
    metadata = files[f"{DIST_INFO}/METADATA"].decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"Requires-Python: {PROJECT['requires-python']}" in metadata
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in metadata
    assert "pdgemm = pdgemm.tools.cli.commands:main" in files[f"{DIST_INFO}/entry_points.txt"].decode()


def test_wheel_from_sdist_is_the_same(wheel: Path, sdist: Path, tmp: Path) -> None:
    with tarfile.open(sdist) as tar:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        tar.extractall(tmp / "unpacked", **safely)
    (source,) = (tmp / "unpacked").iterdir()
    again = contents(build("wheel", source, tmp / "wheel-from-sdist"))
    record = f"{DIST_INFO}/RECORD"  # lists the others in an order of its own
    first = contents(wheel)
    assert again.keys() == first.keys()
    assert [n for n in first if n != record and again[n] != first[n]] == []


def test_installed_wheel_imports(installed: Path, tmp: Path) -> None:
    code = "import io, pdgemm, pdgemm.grids, pdgemm.io.hdf5 as h; print(pdgemm.__file__, h.__file__, io.__file__)"
    package, hdf5, stdlib_io = python("-c", code, cwd=tmp, path=installed).split()
    assert Path(package) == installed / "pdgemm" / "__init__.py"
    assert Path(hdf5) == installed / "pdgemm" / "io" / "hdf5.py"
    assert installed not in Path(stdlib_io).parents
    version = python("-c", "import pdgemm; print(pdgemm.__version__)", cwd=tmp, path=installed)
    assert version.strip() == PROJECT["version"]


def test_import_is_light(installed: Path, tmp: Path) -> None:
    code = "import sys, pdgemm; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(python("-c", code, cwd=tmp, path=installed).split())
    assert "pdgemm" in loaded
    assert loaded & {"cupy", "h5py", "jinja2", "matplotlib", "mpi4py"} == set()


def test_links_in_the_checkout(source: Path) -> None:
    for name in ("grids", "io"):
        assert (source / "pdgemm" / name).readlink() == Path("..") / name
    # With it, a program started in the checkout could not import the standard library's io.
    assert not (source / "io" / "__init__.py").exists()
