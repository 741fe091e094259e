"""The rooms of ARCHITECTURE.md: imports go down only, and pure arithmetic needs no MPI."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = [
    {
        "pdgemm.errors",
        "pdgemm.watchdog",
        "pdgemm.files",
        "pdgemm.reading",
        "pdgemm.dtypes",
        "pdgemm.whole",
        "pdgemm.protocols",
        "pdgemm.elements",
        "pdgemm.timing",
        "pdgemm.tracing",
        "pdgemm.blas",
        "pdgemm.device",
        "pdgemm.gpus",
        "pdgemm.kernels",
        "pdgemm.local",
    }
    | {"pdgemm.grids.distribution", "pdgemm.grids.runs", "pdgemm.grids.layout"},
    {"pdgemm.profile", "pdgemm.advice", "pdgemm.schedule", "pdgemm.costs", "pdgemm.machine", "pdgemm.studies"}
    | {
        "pdgemm.studies.cases",
        "pdgemm.studies.records",
        "pdgemm.studies.steps",
        "pdgemm.studies.energy",
        "pdgemm.boxes",
        "pdgemm.threads",
        "pdgemm.explain",
    }
    | {"pdgemm.families"}
    | {
        "pdgemm.grids.process_grid",
        "pdgemm.grids.node_memory",
        "pdgemm.grids.heap",
        "pdgemm.movers",
        "pdgemm.movers.ibcast",
        "pdgemm.movers.ring",
    }
    | {
        "pdgemm.movers.shift",
        "pdgemm.movers.staged",
        "pdgemm.movers.nccl",
        "pdgemm.movers.reduce",
        "pdgemm.streams",
        "pdgemm.blockcopy",
        "pdgemm.exchange",
        "pdgemm.probe",
        "pdgemm.cuda",
        "pdgemm.cuda_reach",
    },
    {
        "pdgemm.pipeline",
        "pdgemm.neighbours",
        "pdgemm.panels",
        "pdgemm.matrix",
        "pdgemm.gather",
        "pdgemm.batch",
        "pdgemm.norms",
        "pdgemm.products",
        "pdgemm.products.product",
        "pdgemm.products.line",
        "pdgemm.products.summa",
        "pdgemm.products.stationary",
        "pdgemm.products.cannon",
        "pdgemm.products.layered",
        "pdgemm.candidates",
        "pdgemm.planner",
        "pdgemm.saved",
        "pdgemm.estimates",
        "pdgemm.choice",
        "pdgemm.simulate",
        "pdgemm.studies.curves",
        "pdgemm.studies.predictions",
        "pdgemm.studies.panels",
        "pdgemm.studies.figures",
        "pdgemm.studies.findings",
        "pdgemm.studies.page",
    },
    {"pdgemm.accumulator", "pdgemm.summa", "pdgemm.stationary", "pdgemm.cannon", "pdgemm.layered"}
    | {"pdgemm.arguments", "pdgemm.report", "pdgemm.residual"},
    {"pdgemm.redistribution", "pdgemm.prepared", "pdgemm.gemm"},
    {"pdgemm.scalapack", "pdgemm.descriptors", "pdgemm.blacs", "pdgemm.batched", "pdgemm.calibrate"},
    {"pdgemm.io.atomic", "pdgemm.io.checksum", "pdgemm.io.pieces", "pdgemm.io.rawio", "pdgemm.io.hyperslabs"}
    | {"pdgemm.io.stored", "pdgemm.io.hdf5"},
    {"pdgemm.timeline", "pdgemm.ending", "pdgemm.forms", "pdgemm.options", "pdgemm.session", "pdgemm.info"},
    {"pdgemm.studies.measure", "pdgemm.studies.run", "pdgemm.studies.commands", "pdgemm.studies.plot"},
    {"pdgemm.cli", "pdgemm.__main__"},
]
CALLS_UP = {  # at run time: A @ B, A.redistribute(), plan.execute()
    ("pdgemm.matrix", "pdgemm.gemm"),
    ("pdgemm.matrix", "pdgemm.redistribution"),
    ("pdgemm.planner", "pdgemm.gemm"),
    ("pdgemm.planner", "pdgemm.prepared"),
}
PURE = [
    "errors",
    "watchdog",
    "files",
    "elements",
    "timing",
    "tracing",
    "profile",
    "advice",
    "device",
    "streams",
    "gpus",
    "schedule",
    "costs",
    "machine",
    "explain",
    "reading",
    "saved",
    "boxes",
    "candidates",
    "planner",
    "families",
    "estimates",
    "choice",
    "simulate",
    "panels",
    "local",
    "blas",
    "kernels",
    "forms",
    "dtypes",
    "whole",
    "protocols",
    "blockcopy",
    "exchange",
    "products",
    "options",
    "studies.cases",
    "studies.records",
    "studies.steps",
    "studies.energy",
    "studies.commands",
    "studies.curves",
    "studies.predictions",
    "studies.panels",
    "studies.figures",
    "studies.findings",
    "studies.page",
    "studies.plot",
    "grids.distribution",
    "grids.runs",
    "grids.layout",
    "grids.heap",
]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", ""): path
    for path in [
        *(ROOT / "pdgemm").glob("*.py"),
        *(ROOT / "pdgemm" / "movers").glob("*.py"),
        *(ROOT / "pdgemm" / "products").glob("*.py"),
        *(ROOT / "pdgemm" / "studies").glob("*.py"),
        *(ROOT / "pdgemm" / "grids").glob("*.py"),
        *(ROOT / "pdgemm" / "io").glob("*.py"),
    ]
}


def imports(path: Path) -> set[str]:
    """The modules of this package that a module imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(FILES)


def level(module: str) -> int:
    return next(number for number, modules in enumerate(LEVELS) if module in modules)


ROOMS = sorted(set(FILES) - {"pdgemm", "pdgemm.grids"})


@pytest.mark.parametrize("module", ROOMS)
def test_imports_go_down(module: str) -> None:
    for other in imports(FILES[module]) - {"pdgemm", "pdgemm.grids", module}:
        if (module, other) not in CALLS_UP:
            assert level(other) <= level(module), f"{module} imports {other}, which lies above it"


@pytest.mark.parametrize("module", ROOMS)
def test_only_io_opens_hdf5_files(module: str) -> None:
    text = FILES[module].read_text()
    allowed = module.startswith("pdgemm.io.") or module == "pdgemm.info"  # which tells h5py's version
    assert allowed or "h5py" not in {name.split(".")[0] for name in _all_imports(text)}


def _all_imports(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    return {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }


@pytest.mark.parametrize("module", PURE)
def test_arithmetic_needs_no_mpi(module: str) -> None:
    code = f"import sys, pdgemm.{module}; print(*{{'mpi4py.MPI', 'cupy', 'h5py'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_public_names_and_their_docstrings() -> None:
    import pdgemm

    for name in pdgemm.__all__:
        assert getattr(pdgemm, name).__doc__
    assert set(pdgemm.__all__) <= set(dir(pdgemm))
    for module in FILES:
        if not module.endswith("__main__") and (find_spec("cupy") or "cuda" not in module):
            import_module(module)
    assert all(callable(getattr(pdgemm, name)) for name in pdgemm.__all__)  # and no module of the same name
    with pytest.raises(AttributeError, match="no attribute 'pdgem'"):
        _ = pdgemm.pdgem  # type: ignore[attr-defined]
