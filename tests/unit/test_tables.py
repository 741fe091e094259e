"""Tables for people."""

from __future__ import annotations

import pytest

from pdgemm.support.text import Table
from pdgemm.tools.studies.curves import Results, Section
from pdgemm.tools.studies.page import Drawn, page


def test_words_stand_left_and_figures_right() -> None:
    table = Table(("name", "seconds"), [("a", "1.5"), ("longer", "12.25")], words=("name",), title="times")
    assert str(table).splitlines() == ["times", "name    seconds", "a           1.5", "longer    12.25"]


def test_cells_are_what_they_are() -> None:
    """Neither the markup of rich nor emoji are read, and no line is wrapped or cut."""
    cell = f"[bold]1[/bold] :heart: {'x' * 500}"
    assert str(Table(("", ""), [("key", cell)], words=("",))) == f"key  {cell}"


def test_html_is_escaped() -> None:
    pytest.importorskip("jinja2")
    text = page(Results([Section("strong")], [("<b>", "a & b")]), [Drawn(Section("strong"), {}, [])], ["<i>"], ["<u>"])
    assert "<li>&lt;b&gt;: a &amp; b</li>" in text and "<li>&lt;i&gt;</li>" in text and "<pre>&lt;u&gt;</pre>" in text
