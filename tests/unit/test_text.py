"""Texts of numbers and tables."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from pdgemm.support import text as module
from pdgemm.support.text import Table, counted_short, echo, in_bytes, in_rate, in_seconds, in_words, printable
from pdgemm.tools.studies.curves import Results
from pdgemm.tools.studies.plot import ReportSection, page


def test_a_terminal_shows_names_and_does_not_obey_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[2J\x9b1m\r\u202eb") == "a\\x1b[2J\\x9b1m\\r\\u202eb"
    assert printable("lines\nand\ttabs, Ä, 漢, 𝔸\udc80") == "lines\nand\ttabs, Ä, 漢, 𝔸\udc80"
    echo("x\x1b]0;title\x07")
    echo(["\x1b"], err=True)
    assert capsys.readouterr() == ("x\\x1b]0;title\\x07\n", "['\\x1b']\n")


def test_output_of_commands_is_printable() -> None:
    """Modules that print call `echo` or `printable`, which make any text printable."""
    package = Path(module.__file__).parents[1]
    for path in {*package.rglob("*.py"), *(package / "io").rglob("*.py"), *(package / "grids").rglob("*.py")}:
        source = path.read_text()
        if not any(name in source for name in ("click.echo(", "print(", "os.write(")):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "print", "os.write"):
                of_user = path.name == "report.py"  # `Report.print()` is called by programs of users
                no_name = ast.unparse(node).startswith("os.write(self._tells")
                assert of_user or no_name or "printable" in source, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("text_of", "numbers", "texts"),
    [
        (in_seconds, (0, 3e-10, 1.2e-5, 3.4e-3, 1.2, -1.2, 84.4), "0 s, 0.30 ns, 12 us, 3.4 ms, 1.2 s, -1.2 s, 84 s"),
        (in_seconds, (119.4, 1060, 7200, 3 * 86400, 4e9), "119 s, 18 min, 2.0 h, 3.0 days, 46296 days"),
        (in_seconds, (9.96e-6, 0.99996), "10 us, 1.0 s"),  # rounded up to the next unit
        (in_words, (0, 0.6, 3072, 9999.4), "0 words, 1 word, 3072 words, 9999 words"),
        (in_words, (9999.6, 999_960, 604e6, 3e21), "10.0 k words, 1.00 M words, 604 M words, 3000 E words"),
        (in_rate, (0, 0.5, 950, 2_000), "0 FLOP/s, 0.50 FLOP/s, 950 FLOP/s, 2.0 kFLOP/s"),
        (in_rate, (84e9, 999.96e9, 1.1e18), "84 GFLOP/s, 1.0 TFLOP/s, 1.1 EFLOP/s"),
        (in_bytes, (0, 1023, 1536, 5 * 2**30, 2**50), "0 B, 1023 B, 1.5 KiB, 5.0 GiB, 1024.0 TiB"),
        (lambda n: counted_short(n, "message"), (12_345_678, 1), "12.3 M messages, 1 message"),
    ],
)
def test_numbers(text_of: Callable[[float], str], numbers: tuple[float, ...], texts: str) -> None:
    assert ", ".join(map(text_of, numbers)) == texts


def test_nan_and_infinity_are_printed() -> None:
    assert [f(math.nan) for f in (in_seconds, in_words, in_rate)] == ["nan s", "nan words", "nan FLOP/s"]
    assert in_seconds(math.inf) == "inf s"


def test_tables() -> None:
    """Text is aligned left, numbers right; rich does not interpret markup and emoji, and cuts no line."""
    table = Table(("name", "seconds"), [("a", "1.5"), ("longer", "12.25")], words=("name",), title="times")
    assert str(table).splitlines() == ["times", "name    seconds", "a           1.5", "longer    12.25"]
    cell = f"[bold]1[/bold] :heart: {'x' * 500}"
    assert str(Table(("", ""), [("key", cell)], words=("",))) == f"key  {cell}"


def test_html_is_escaped() -> None:
    pytest.importorskip("jinja2")
    section = ReportSection("<u>", "strong", [], {"first": Table(("<s>",), [("<p>",)])})
    text = page(Results(unread=[("<b>", "a & b")], notes=["<i>"]), [section]).decode()
    assert "<li>&lt;b&gt;: a &amp; b</li>" in text and "<li>&lt;i&gt;</li>" in text and "<h2>&lt;u&gt;</h2>" in text
    assert "<p>&lt;" not in text and "&lt;s&gt;" in text and "&lt;p&gt;" in text
