"""Attributes of HDF5 objects, whose strings have a fixed length.

Strings of variable length lie in a global heap of the file, and HDF5 2.0.0 reads for ever in a heap with a flipped bit
in its free space.  Files of earlier versions of pdgemm have strings of variable length, and can be read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpi4py.MPI  # noqa: F401  # before h5py: an h5py built with MPI needs it

import h5py  # isort: skip
import numpy as np


def write_attributes(item: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes of a file, group or dataset."""
    for name, value in attributes.items():
        if isinstance(value, str):
            _write_text(item, name, value)
        else:
            item.attrs[name] = value


def _write_text(item: Any, name: str, value: str) -> None:
    """Set one attribute, to the byte as `item.attrs.create` does, which takes four times as long."""
    spelt = np.array(value.encode(errors="surrogateescape") or b"\0")  # file names may be undecodable
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(spelt.itemsize)
    kind.set_strpad(h5py.h5t.STR_NULLPAD)
    kind.set_cset(h5py.h5t.CSET_UTF8)
    if h5py.h5a.exists(item.id, name.encode()):
        h5py.h5a.delete(item.id, name.encode())
    h5py.h5a.create(item.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(spelt, mtype=kind)


def read_attribute(item: Any, name: str) -> Any:
    """Return an attribute, and a string of fixed or variable length as `str`; None if the attribute is missing."""
    value = item.attrs.get(name)
    return value.decode(errors="surrogateescape") if isinstance(value, np.bytes_) else value
