"""The order of folders in ARCHITECTURE.md: imports follow it, without cycles; pure arithmetic does not load MPI."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec

import pytest
from house import MODULES, imported, inside, trees

import pdgemm

FLOORS = [  # A module imports from folders or modules before it in the list; the longest prefix of its name counts.
    "errors", "names", "local.arrays", "local", "support", "grids", "instrument", "devices", "schedules",
    "schedules.exchanges", "schedules.products", "schedules.collectives", "schedules.panels",
    "schedules.training", "planning", "transport", "transport.panels", "matrix", "algorithms.protection",
    "algorithms", "algorithms.indexing", "algorithms.statistics", "algorithms.panels", "gemm",
    "batched", "grouped", "scaled", "linalg.ranges", "linalg.factors", "linalg.work", "linalg.functions",
    "linalg.eigen", "linalg.singular", "linalg", "tensors", "array_api", "interop", "interchange", "scalapack",
    "statistics",
    "resilience", "io", "io.streamed", "parallel", "training",
    "tools.calibrate", "tools.profiling", "tools.studies", "tools", "__main__",
]  # fmt: skip
PURE = ["errors", "names", "local", "support", "instrument", "schedules", "planning"]  # no MPI, HDF5 or CuPy
PURE_MODULES = [
    "devices.streams", "devices.gpu_binding", "grids.distribution", "grids.index_map", "grids.index_pairs",
    "grids.layout", "grids.rectangles", "grids.shared_heap", "grids.tensor_layout", "grids.grid_shapes",
    "tools.verification.hpl", "tools.verification.verify_training",
    *(f"tools.profiling.{x}" for x in ("profile", "profile_tables")),
    *(f"tools.cli.{x}" for x in ("commands", "job", "options", "plan_commands", "product_commands",
                                 "model_commands", "report_commands", "scaling", "script")),
    *(f"tools.studies.{x}" for x in ("cases", "curves", "figures", "jobs", "pictures", "plot", "predictions",
                                     "records")),
]  # fmt: skip
NEED_CUPY = [
    f"devices.{x}" for x in ("cuda", "cuda_ipc", "cuda_nccl", "cusolver", "generators", "grouped_gemm", "kernels")
]
NEED_TORCH = ("training", "tools.verification.training_")
LONGEST = 400  # lines of a module
MOST_CLASSES = 22  # public classes of a folder


def floor(module: str) -> int:
    names = module.split(".")
    return FLOORS.index(next(x for n in range(len(names), 0, -1) if (x := ".".join(names[:n])) in FLOORS))


def test_no_import_of_a_higher_floor() -> None:
    up = [f"{module} imports {other}" for module in MODULES for other in inside(module) if floor(other) > floor(module)]
    assert up == []


def test_no_import_cycles() -> None:
    list(TopologicalSorter({module: inside(module) for module in MODULES}).static_order())  # raises CycleError


def test_names_of_public_classes_are_unique() -> None:
    classes = [node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [name for name in classes if not name.startswith("_")]
    assert sorted(names) == sorted({*names})


def test_folders_have_few_ideas() -> None:
    ideas = Counter(
        MODULES[module].parent
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {path: number for path, number in ideas.items() if number > MOST_CLASSES} == {}


def test_modules_and_folders_are_small_and_module_names_unique() -> None:
    names = [module.split(".")[-1] for module in MODULES if MODULES[module].name != "__init__.py"]
    assert sorted(names) == sorted({*names})
    for path in MODULES.values():
        assert len(path.read_text().splitlines()) <= LONGEST, path
    folders = [path.parent for path in MODULES.values() if path.name != "__init__.py"]
    assert max(map(folders.count, folders)) <= 13


def test_only_io_opens_hdf5_files() -> None:
    tells_the_version = "tools.profiling.environment"
    for module in MODULES.keys() - {tells_the_version}:
        assert module.startswith("io.") or "h5py" not in {name.split(".")[0] for name in imported(module)}


def test_arithmetic_needs_no_mpi() -> None:
    """Pure modules are imported one by one, in the order of FLOORS: the error names the first that loads MPI."""
    pure = [module for module in sorted(MODULES, key=floor) if module.split(".")[0] in PURE]
    code = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module("pdgemm." + name)
    assert not {"mpi4py.MPI", "cupy", "h5py"} & {*sys.modules}, name
"""
    command = [sys.executable, "-c", code, *pure, *PURE_MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_public_names_and_their_docstrings() -> None:
    for name in pdgemm.__all__:
        assert getattr(pdgemm, name).__doc__
    modules = {"array_api", "interchange", "io", "linalg", "parallel", "scalapack", "statistics", "gpus"}
    assert set(pdgemm.__all__) | modules | {"__doc__", "__version__"} == set(dir(pdgemm))
    found = subprocess.run(
        [sys.executable, "-c", "import pdgemm; print(pdgemm.io.hdf5.load, pdgemm.scalapack, pdgemm.gpus.choose)"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    for module in MODULES:
        missing = "cupy" if module in NEED_CUPY else "torch" if module.startswith(NEED_TORCH) else "sys"
        if module != "__main__" and find_spec(missing):
            import_module(f"pdgemm.{module}")
    assert all(callable(getattr(pdgemm, name)) for name in pdgemm.__all__)  # no module hides a function
    with pytest.raises(AttributeError, match="no attribute 'pdgem'"):
        _ = pdgemm.pdgem  # type: ignore[attr-defined]
