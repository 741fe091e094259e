"""docs/examples/notebook.ipynb, run from its first cell to its last in a new kernel, with MPI engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import needs_mpiexec
from tiers import thorough

pytestmark = thorough

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "examples" / "notebook.ipynb"
nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")


def shown_by(cell: Any) -> str:
    """Return the text of a cell's outputs and result."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(texts)


@needs_mpiexec
def test_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipyparallel")
    pytest.importorskip("matplotlib")
    for variable in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):  # not the user's own folders
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", resources=resources).execute()
    shown = {cell.source: shown_by(cell) for cell in notebook.cells if cell.cell_type == "code"}

    # equal before and after the error
    (part,) = {text for source, text in shown.items() if source.startswith('view["part"]')}
    assert part == "[(300, 150), (300, 150), (300, 150), (300, 150)]"
    told = "".join(shown.values())
    assert "C (600 x 300) := A (600 x 400) B" in told and "4 engines" in told
    assert "as NumPy says: True" in told
    for engine in range(4):
        assert f"[{engine}:execute]LayoutError: inner dimensions do not agree: op(A) is 600 x 400" in told
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


def test_no_output_is_kept_in_the_repository() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
