"""Configuration of Sphinx, which `scripts/docs.sh` calls.

The source folder is the checkout, so that links between pages work in the site and in a browsed repository.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import docstrings
import drawings

project, author, copyright = "pdgemm", "the authors of pdgemm", "the authors of pdgemm"
version = release = installed("pdgemm")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_click", "sphinx_copybutton"]

root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/**", "*.md", "slurm/*.md"]
exclude_patterns = [".*", "build", "dist", "demo-data", "study-data"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
highlight_language = "text"
smartquotes = False  # -- begins an option
copybutton_prompt_text = r">>> |\.\.\. |\$ |> "
copybutton_prompt_is_regexp = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"
autosummary_generate = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"pdgemm {version}"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def code_in_help(app: object, context: object, lines: list[str]) -> None:
    """Show text in single backticks as code in the help of the commands."""
    lines[:] = [re.sub(r"(?<![:`])`([^`<>]+)`(?!`)", r"``\1``", line) for line in lines]


def plain_signs_in_help(app: object, context: object, lines: list[str]) -> None:
    """Show | and * outside of code, such as in |A|, as they are."""
    lines[:] = [re.sub(r"(``.+?``)|([|*])", lambda x: x[1] or f"\\{x[2]}", line) for line in lines]


def only_patterns_that_match(app: object, docname: str, source: list[str]) -> None:
    """Remove patterns from the table of contents that match no page of this version."""
    here, pattern = Path(__file__).parent, re.compile(r"[\w/-]+\*")
    if docname == root_doc:
        lines = source[0].split("\n")
        source[0] = "\n".join(line for line in lines if not pattern.fullmatch(line) or any(here.glob(f"{line}.md")))


def names_of_defaults(app: object, what: str, name: str, obj: object, options: object, *shown: str | None) -> Any:
    """Show a class or a function that is the default value of an argument by its name."""
    arguments, returned = shown
    return arguments and re.sub(r"<(?:class|built-in function) '?(?:\w+\.)*(\w+)'?>", r"\1", arguments), returned


def front_page(app: object, error: Exception | None) -> None:
    """Write an index.html that redirects from the folder of the site to its first page."""
    if error is None and app.builder.format == "html":  # type: ignore[attr-defined]
        page = '<!DOCTYPE html><title>pdgemm</title><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)  # type: ignore[attr-defined]


def setup(app: object) -> None:
    drawings.draw(Path(__file__).with_name("pictures"), keep=["block-cyclic"])  # which is committed, for README.md
    app.connect("autodoc-process-docstring", docstrings.hook)  # type: ignore[attr-defined]
    app.connect("autodoc-process-signature", names_of_defaults)  # type: ignore[attr-defined]
    for event in ("sphinx-click-process-description", "sphinx-click-process-options"):
        app.connect(event, code_in_help)  # type: ignore[attr-defined]
    app.connect("sphinx-click-process-description", plain_signs_in_help)  # type: ignore[attr-defined]
    app.connect("source-read", only_patterns_that_match)  # type: ignore[attr-defined]
    app.connect("build-finished", front_page)  # type: ignore[attr-defined]
