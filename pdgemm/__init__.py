"""pdgemm: distributed dense matrix multiplication, C := alpha op(A) op(B) + beta C, on MPI.

>>> from mpi4py import MPI
>>> from pdgemm import DistMatrix, ProcessGrid, pdgemm
>>> grid = ProcessGrid(MPI.COMM_WORLD)
>>> A = DistMatrix.random((300, 200), grid=grid, block=64, seed=0)
>>> B = DistMatrix.random((200, 100), grid=grid, block=64, seed=1)
>>> C = pdgemm(1.0, A, B)
>>> C.shape
(300, 100)

A name is imported at its first use, so modules without communication, such as `pdgemm.schedules.steps`, need no MPI.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

if _TYPE_CHECKING:
    from pdgemm import (
        array_api as array_api,
        interchange as interchange,
        io as io,
        linalg as linalg,
        parallel as parallel,
        scalapack as scalapack,
        statistics as statistics,
    )
    from pdgemm.algorithms.epilogue import Epilogue as Epilogue
    from pdgemm.algorithms.indexing.routing import Routing as Routing, plan_grouped as plan_grouped
    from pdgemm.algorithms.indexing.selection import assign as assign, select as select
    from pdgemm.algorithms.protection.checksum import checksum as checksum
    from pdgemm.algorithms.redistribution import redistribute as redistribute
    from pdgemm.batched import matmul_batched as matmul_batched
    from pdgemm.devices import gpu_binding as gpus  # noqa: F401
    from pdgemm.errors import CorruptionError as CorruptionError, PdgemmError as PdgemmError
    from pdgemm.gemm import Plan as Plan, matmul as matmul, pdgemm as pdgemm, plan as plan
    from pdgemm.grids.distribution import BlockCyclic as BlockCyclic, Distribution as Distribution
    from pdgemm.grids.process_grid import ProcessGrid as ProcessGrid, set_default_grid as set_default_grid
    from pdgemm.grouped import matmul_grouped as matmul_grouped
    from pdgemm.instrument.report import Report as Report
    from pdgemm.io.streamed.multiply_files import multiply_files as multiply_files
    from pdgemm.io.streamed.stored_matrix import StoredMatrix as StoredMatrix
    from pdgemm.matrix.batch import Batch as Batch
    from pdgemm.matrix.distmatrix import DistMatrix as DistMatrix
    from pdgemm.matrix.residual import verify as verify
    from pdgemm.planning.machines.machine import Machine as Machine, load_machine as load_machine
    from pdgemm.planning.tensors.einsum_plan import plan_einsum as plan_einsum
    from pdgemm.resilience.survivors import resilient as resilient
    from pdgemm.scaled.quantization import quantize as quantize
    from pdgemm.scaled.scaled_matrix import Scaled as Scaled
    from pdgemm.schedules.dealing import balance as balance
    from pdgemm.tensors.dist_tensor import DistTensor as DistTensor
    from pdgemm.tensors.einsum import einsum as einsum, tensordot as tensordot
    from pdgemm.tools.profiling.trace_file import trace as trace

_NAMES = {  # the public names of each module
    "pdgemm.algorithms.redistribution": ["redistribute"],
    "pdgemm.batched": ["matmul_batched"],
    "pdgemm.errors": ["CorruptionError", "PdgemmError"],
    "pdgemm.grouped": ["matmul_grouped"],
    "pdgemm.gemm": ["Plan", "matmul", "pdgemm", "plan"],
    "pdgemm.grids.distribution": ["BlockCyclic", "Distribution"],
    "pdgemm.grids.process_grid": ["ProcessGrid", "set_default_grid"],
    "pdgemm.algorithms.epilogue": ["Epilogue"],
    "pdgemm.algorithms.indexing.routing": ["Routing", "plan_grouped"],
    "pdgemm.algorithms.indexing.selection": ["assign", "select"],
    "pdgemm.instrument.report": ["Report"],
    "pdgemm.algorithms.protection.checksum": ["checksum"],
    "pdgemm.matrix.batch": ["Batch"],
    "pdgemm.matrix.distmatrix": ["DistMatrix"],
    "pdgemm.matrix.residual": ["verify"],
    "pdgemm.planning.machines.machine": ["Machine", "load_machine"],
    "pdgemm.scaled.quantization": ["quantize"],
    "pdgemm.scaled.scaled_matrix": ["Scaled"],
    "pdgemm.schedules.dealing": ["balance"],
    "pdgemm.planning.tensors.einsum_plan": ["plan_einsum"],
    "pdgemm.tensors.dist_tensor": ["DistTensor"],
    "pdgemm.tensors.einsum": ["einsum", "tensordot"],
    "pdgemm.tools.profiling.trace_file": ["trace"],
    "pdgemm.resilience.survivors": ["resilient"],
    "pdgemm.io.streamed.multiply_files": ["multiply_files"],
    "pdgemm.io.streamed.stored_matrix": ["StoredMatrix"],
}
_BELOW = ("array_api", "interchange", "io", "linalg", "parallel", "scalapack", "statistics")
_MODULES = {**{name: f"pdgemm.{name}" for name in _BELOW}, "gpus": "pdgemm.devices.gpu_binding"}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)  # no modules: a star import would hide Python's modules of the same names, such as io


def __getattr__(name: str) -> _Any:
    value: _Any
    if name == "__version__":
        value = _version()
    elif name in _HOME:
        value = getattr(_import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = _import_module(_MODULES[name])
        for module in ("hdf5", "npy") if name == "io" else ():  # pdgemm.io has no __init__.py to import these
            _import_module(f"pdgemm.io.{module}")
    else:
        raise AttributeError(f"module 'pdgemm' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pdgemm")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*_HOME, *_MODULES, "__doc__", "__version__"})
