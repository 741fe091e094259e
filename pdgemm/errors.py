"""The exceptions that pdgemm raises; `pdgemm.support.agreement` raises the same exception on all ranks."""

from __future__ import annotations

import numpy as np


class PdgemmError(Exception):
    """The base class of the exceptions that pdgemm raises on purpose; a message is one line, the same on all ranks."""


class LayoutError(PdgemmError, ValueError):
    """Shapes, blocks or layouts do not fit together."""


class GridError(PdgemmError, ValueError):
    """A process grid cannot be built or was freed, or grids differ where one grid is needed."""


class MeshError(GridError):
    """The sizes of a mesh do not fit its ranks, or each other."""


class DTypeError(PdgemmError, TypeError):
    """An element type is not supported, or types differ."""


class ArgumentError(PdgemmError, ValueError):
    """An argument is out of its range, or not the same on all ranks."""


class KeyIndexError(ArgumentError, IndexError):
    """A key does not select rows, columns or elements of a matrix: an index is out of range, or is not an index."""


class MemoryLimitError(PdgemmError, MemoryError):
    """The memory limit is too small; the message names a sufficient limit."""


class OutOfMemoryError(PdgemmError, MemoryError):
    """A rank could not allocate the memory that it needs."""


class NodeMemoryError(OutOfMemoryError):
    """No memory is left in the window that the ranks of a node share."""


class DeviceError(PdgemmError, ValueError):
    """A device does not exist, or matrices are in the memory of different devices."""


class MappingError(DeviceError):
    """A rank cannot map the GPU memory of another rank: from then on ranks send messages instead of reading it."""


class FileError(PdgemmError, OSError):
    """A file or dataset cannot be read or written."""


class LinAlgError(PdgemmError, np.linalg.LinAlgError):
    """A matrix is singular or not positive definite, or an iteration does not converge."""


class CorruptionError(PdgemmError, ArithmeticError):
    """A result or an operand is wrong, as if a bit had flipped; the message names the rank and its node."""
