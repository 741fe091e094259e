"""Docstrings in the project's style become reStructuredText without a loss."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import docutils.core
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import docstrings

TEXT = """Compute |A| x_i by `f(x)`, `g`s and *h*.

alpha, beta : scalars.  beta == 0: C is not read.
C    : a matrix (m, n);
      a view too.
how  : one of
    "summa"  C is stationary;
    "row", "column"  a grid
             of one row.

    a = f(1)
    b = f(2)

Returns C.
Raises ValueError.

>>> 1 + 1
2
"""


def as_html(text: str) -> str:
    made = "\n".join(docstrings.converted(text.splitlines()))
    parts = docutils.core.publish_parts(made, writer="html5", settings_overrides={"report_level": 1, "halt_level": 2})
    return str(parts["body"])


def test_docstring() -> None:
    html = as_html(TEXT)
    code = '<span class="docutils literal">'
    assert f"Compute |A| x_i by {code}f(x)</span>, {code}g</span>s and *h*." in " ".join(html.split())
    assert html.count("<dt>") == 3
    assert f"<dt>{code}alpha, beta</span></dt>\n<dd><p>scalars.  beta == 0: C is not read.</p>" in html
    assert "<dd><p>a matrix (m, n);\na view too.</p>" in html
    assert html.count("<li>") == 2 and "of one row." in html
    assert '<pre class="literal-block">a = f(1)\nb = f(2)</pre>' in html
    assert "<p>Returns C.</p>\n<p>Raises ValueError.</p>" in html
    assert '<pre class="code python doctest">' in html


@pytest.mark.parametrize("text", ["`a", "a_ b_", "*a", "|a", "**a** ``b``", "a\\b", ":math:`x`", ".. note:: a", "a::"])
def test_markup_in_docstrings_is_escaped(text: str) -> None:
    shown = docutils.core.publish_doctree("\n".join(docstrings.converted([text])), settings_overrides={"halt_level": 2})
    assert shown.astext().strip() == re.sub(r"`+(.+?)`+", r"\1", text)


def words_in(picture: Path) -> list[str]:
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in texts]


def test_drawings_are_of_the_schedules(tmp_path: Path) -> None:
    import drawings

    drawings.draw(tmp_path)
    words = {name: words_in(tmp_path / f"{name}.svg") for name in drawings.PICTURES}
    blocks = [str(i % 2 * 3 + j % 3) for i in range(5) for j in range(6)]
    assert [word for word in words["block-cyclic"] if word.isdigit()] == blocks
    local = [f"{i},{j}" for i in (2, 3, 6, 7) for j in (2, 3, 8, 9)]
    assert [word for word in words["block-cyclic"] if "," in word] == local
    held = [word for word in words["cannon"] if word[0] in "AB" and word[1:].isdigit()]
    assert len(held) == 2 * 3 * 9
    for i in range(3):
        for j in range(3):
            at = [2 * (9 * step + 3 * i + j) for step in range(3)]
            assert {held[x] for x in at} == {f"A{i}{k}" for k in range(3)}
            assert [held[x + 1] for x in at] == [f"B{held[x][2]}{j}" for x in at]
    assert {word for word in words["layers"] if word.isdigit()} == set("01234567")
    assert words_in(Path(drawings.__file__).with_name("pictures") / "block-cyclic.svg") == words["block-cyclic"]
