"""Fixtures of tests of commands."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.h5:/x (61 x 83) and b.h5:/y (83 x 29), written by plain h5py."""
    made = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(1)
    with h5py.File(made / "a.h5", "w") as file:
        file["x"] = rng.standard_normal((61, 83))
        file["vector"] = np.zeros(4)
        file["integers"] = np.ones((83, 3), "i4")
        file["flags"] = np.ones((83, 3), bool)
        file["c"] = np.ones((61, 29))
        file["square"] = np.eye(4)
        file.create_dataset("tall", (3_000_000, 1), "f8")  # takes no disk space as long as no elements are written
    (made / "text.h5").write_text("no matrix\n")
    with h5py.File(made / "links.h5", "w") as file:
        file["b"] = h5py.ExternalLink("b.h5", "/")
        file["soft"] = h5py.SoftLink("/y")
        file["y"] = np.ones((83, 29))
    with h5py.File(made / "b.h5", "w") as file:
        file["y"] = rng.standard_normal((83, 29))
    return made
