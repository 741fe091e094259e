"""docs/examples/README.md is up to date (scripts/gallery.py writes it), and its commands run as printed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from jobs import needs_mpiexec, run
from tiers import thorough

pytestmark = thorough

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (EXAMPLES / "README.md").read_text()


def test_texts_and_pictures_are_those_of_the_examples() -> None:
    pytest.importorskip("PIL")
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "scripts" / "gallery.py")
    assert spec and spec.loader
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    assert {*gallery.COMMANDS} == {path.stem for path in EXAMPLES.glob("*.py")}
    outputs = re.findall(r"^\$ [^\n]*examples/(\w+)\.py[^\n]*\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert gallery.page(dict(outputs)) == PAGE  # if not, run scripts/gallery.py
    pictures = {path.stem: path.stat().st_size for path in (EXAMPLES / "pictures").iterdir()}
    assert pictures.keys() == {*gallery.COMMANDS, "gpt_curves", "scaling_study"}
    assert max(pictures.values()) <= 40_000
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (EXAMPLES / target).is_file(), target


@needs_mpiexec
def test_a_command_of_the_gallery(tmp_path: Path) -> None:
    """An example runs from another folder and writes its files to it; one rank prints."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    (line,) = re.findall(r"^\$ (mpirun .*examples/pca\.py)$", PAGE, re.MULTILINE)
    done = run(shlex.split(line.replace("docs/examples", str(EXAMPLES))), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"$ {line}\n{done.stdout}```" in PAGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.h5", "pca.h5", "pca.png"]
